//! A schema in the form that validation runs: subschemas with numbers, references resolved, patterns compiled.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Number, Value};

use super::pattern::Pattern;
use crate::limits;

pub(super) type NodeId = usize;
pub(super) type ResourceId = usize;

pub(super) struct Program {
    pub(super) root: NodeId,
    pub(super) nodes: Vec<Node>,
    pub(super) patterns: Vec<Pattern>,
    /// Targets of dynamic references, by resource and name of the anchor.
    pub(super) dynamic: HashMap<(ResourceId, String), NodeId>,
    /// Roots of the resources that have a recursive anchor.
    pub(super) recursive: HashMap<ResourceId, NodeId>,
}

/// A subschema.
#[derive(Default)]
pub(super) struct Node {
    pub(super) checks: Vec<Check>,
    /// Resource (part of the schema with a URI of its own) that contains the subschema.
    pub(super) resource: ResourceId,
}

/// A keyword, or a group of keywords that belong together.
pub(super) enum Check {
    /// The schema `false`.
    Never,
    Type(Types),
    Enum {
        options: Vec<Value>,
        size: u64,
    },
    Const {
        value: Value,
        size: u64,
    },
    Bound(Bound, Number),
    MultipleOf(Number),
    Length(Bound, u64),
    Items(Bound, u64),
    Properties(Bound, u64),
    Pattern(usize),
    UniqueItems,
    Required(Vec<String>),
    DependentRequired(Vec<(String, Vec<String>)>),
    Object {
        named: BTreeMap<String, NodeId>,
        patterns: Vec<(usize, NodeId)>,
        additional: Option<NodeId>,
    },
    PropertyNames(NodeId),
    Array {
        prefix: Vec<NodeId>,
        rest: Option<NodeId>,
    },
    Contains {
        node: NodeId,
        min: u64,
        max: Option<u64>,
        marks: bool,
    },
    DependentSchemas(Vec<(String, NodeId)>),
    AllOf(Vec<NodeId>),
    AnyOf(Vec<NodeId>),
    OneOf(Vec<NodeId>),
    Not(NodeId),
    If {
        condition: NodeId,
        then: Option<NodeId>,
        otherwise: Option<NodeId>,
    },
    Ref(NodeId),
    DynamicRef {
        target: NodeId,
        anchor: String,
    },
    RecursiveRef {
        target: NodeId,
    },
    /// These two come last, because they depend on the others.
    UnevaluatedItems(NodeId),
    UnevaluatedProperties(NodeId),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Bound {
    Min,
    Max,
    ExclusiveMin,
    ExclusiveMax,
}

/// Set of JSON types.
#[derive(Default, Clone)]
pub(super) struct Types {
    pub(super) names: Vec<String>,
    /// In draft 4, `1.0` is not an integer.
    pub(super) written_integers: bool,
}

impl Types {
    pub(super) fn contain(&self, value: &Value) -> bool {
        self.names.iter().any(|name| match (name.as_str(), value) {
            ("null", Value::Null)
            | ("boolean", Value::Bool(_))
            | ("number", Value::Number(_))
            | ("string", Value::String(_))
            | ("array", Value::Array(_))
            | ("object", Value::Object(_)) => true,
            ("integer", Value::Number(number)) => {
                number.is_i64()
                    || number.is_u64()
                    || (!self.written_integers && number.as_f64().is_some_and(|number| number.fract() == 0.0))
            }
            _ => false,
        })
    }
}

/// Number of subschemas that apply to one value, and how many of them are inside each other.
#[derive(Clone, Copy)]
struct Expanded {
    size: u64,
    depth: usize,
}

impl Node {
    /// Returns true if the subschema has to know which items and properties others have evaluated.
    pub(super) fn is_unevaluated(&self) -> bool {
        let last = self.checks.last();
        matches!(last, Some(Check::UnevaluatedItems(_) | Check::UnevaluatedProperties(_)))
    }
}

impl Program {
    /// Returns the approximate size in memory.
    pub(super) fn bytes(&self) -> usize {
        let checks = |node: &Node| node.checks.capacity() * size_of::<Check>();
        let nodes: usize = self.nodes.iter().map(|node| size_of::<Node>() + checks(node)).sum();
        nodes + self.patterns.iter().map(|pattern| size_of::<Pattern>() + pattern.bytes()).sum::<usize>()
    }

    /// Refuses a schema that expands to too many subschemas for one value, or to infinitely many.
    pub(super) fn check_expansion(&self) -> Result<(), String> {
        let mut known = vec![None; self.nodes.len()];
        for node in 0..self.nodes.len() {
            self.expand(node, 0, &mut known)?;
        }
        Ok(())
    }

    fn expand(&self, node: NodeId, depth: usize, known: &mut [Option<Expanded>]) -> Result<Expanded, String> {
        if let Some(expanded) = known[node] {
            return Ok(expanded);
        }
        if depth > limits::SCHEMA_DEPTH {
            return Err(format!(
                "more than {} subschemas inside each other apply to one value, or a reference leads back to itself",
                limits::SCHEMA_DEPTH
            ));
        }
        let mut all = Expanded { size: 1, depth: 1 };
        for inner in self.in_place(node) {
            let inner = self.expand(inner, depth + 1, known)?;
            all.size = all.size.saturating_add(inner.size);
            all.depth = all.depth.max(inner.depth + 1);
        }
        if all.size > limits::EXPANDED_SCHEMA || all.depth > limits::SCHEMA_DEPTH {
            return Err(format!(
                "more than {} subschemas apply to one value when the references are expanded",
                limits::EXPANDED_SCHEMA
            ));
        }
        known[node] = Some(all);
        Ok(all)
    }

    /// Returns the subschemas of a subschema that apply to the same value.
    fn in_place(&self, node: NodeId) -> Vec<NodeId> {
        let mut inner = Vec::new();
        for check in &self.nodes[node].checks {
            match check {
                Check::AllOf(nodes) | Check::AnyOf(nodes) | Check::OneOf(nodes) => inner.extend(nodes),
                Check::Not(node) | Check::Ref(node) => inner.push(*node),
                Check::DependentSchemas(nodes) => inner.extend(nodes.iter().map(|(_, node)| node)),
                Check::If { condition, then, otherwise } => {
                    inner.push(*condition);
                    inner.extend(then.iter().chain(otherwise));
                }
                // One of them, so this is an upper bound.
                Check::DynamicRef { target, anchor } => {
                    let others = self.dynamic.iter().filter(|((_, name), _)| name == anchor);
                    inner.extend(others.map(|(_, node)| *node).chain([*target]));
                }
                Check::RecursiveRef { target } => inner.extend(self.recursive.values().chain([target])),
                _ => {}
            }
        }
        inner
    }
}
