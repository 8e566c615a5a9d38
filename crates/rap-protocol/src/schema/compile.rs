//! Compiles a JSON Schema document of any draft from 4 to 2020-12.
//!
//! `format`, `contentEncoding` and `contentMediaType` are annotations in every draft; nothing is decoded.

use std::collections::{BTreeMap, HashMap, VecDeque};

use referencing::{Draft, Registry, Uri};
use serde_json::{Map, Value};

use super::pattern::Pattern;
use super::program::{Bound, Check, Node, NodeId, Program, ResourceId, Types};
use super::{Error, Violation, json_path};
use crate::limits;

/// URI of a document that names none.
const DEFAULT_URI: &str = "json-schema:///";

/// Maximum number of places where targets of dynamic references are looked up: resources times names of anchors.
const DYNAMIC_TARGETS: usize = 1_000;

/// A subschema with the context in which its references are resolved.
#[derive(Clone, Copy)]
struct Subschema<'r> {
    schema: &'r Value,
    resource: ResourceId,
    draft: Draft,
}

struct Compiler<'r> {
    registry: &'r Registry<'r>,
    program: Program,
    /// Numbers of the subschemas that were found, by address.
    known: HashMap<usize, NodeId>,
    queue: VecDeque<(NodeId, Subschema<'r>, String)>,
    resources: Vec<Uri<String>>,
    resource_ids: HashMap<String, ResourceId>,
    pattern_numbers: HashMap<String, usize>,
    pattern_bytes: usize,
    anchors: Vec<String>,
    recursive: bool,
    /// Number of resources and anchors that were matched.
    linked: (usize, usize),
}

/// Compiles a document that is valid according to its draft.
pub(super) fn compile(document: &Value) -> Result<Program, Error> {
    let draft = draft(document)?;
    let resource = draft.create_resource_ref(document);
    let uri = resource.id().unwrap_or(DEFAULT_URI).to_owned();
    let invalid = |error: referencing::Error| fault("", error.to_string());
    let uri = referencing::uri::from_str(&uri).map_err(invalid)?;
    let registry = Registry::new().draft(draft).add(uri.as_str(), resource).and_then(|added| added.prepare());
    compile_from(&registry.map_err(invalid)?, &uri, document, draft)
}

/// Compiles the schema that schemas of a draft conform to.
pub(super) fn compile_meta(draft: Draft) -> Result<Program, Error> {
    let uri = match draft {
        Draft::Draft4 => "http://json-schema.org/draft-04/schema",
        Draft::Draft6 => "http://json-schema.org/draft-06/schema",
        Draft::Draft7 => "http://json-schema.org/draft-07/schema",
        Draft::Draft201909 => "https://json-schema.org/draft/2019-09/schema",
        _ => "https://json-schema.org/draft/2020-12/schema",
    };
    let invalid = |error: referencing::Error| fault("", error.to_string());
    let reference = serde_json::json!({ "$ref": uri });
    let own = referencing::uri::from_str(DEFAULT_URI).map_err(invalid)?;
    let resource = draft.create_resource_ref(&reference);
    let registry = Registry::new().draft(draft).add(DEFAULT_URI, resource).and_then(|added| added.prepare());
    compile_from(&registry.map_err(invalid)?, &own, &reference, draft)
}

/// Returns the draft that a document names, or 2020-12.
pub(super) fn draft(document: &Value) -> Result<Draft, Error> {
    match Draft::default().detect(document) {
        Draft::Unknown => Err(fault("/$schema", "not a known draft of JSON Schema".into())),
        draft => Ok(draft),
    }
}

fn compile_from(
    registry: &Registry<'_>,
    uri: &Uri<String>,
    document: &Value,
    draft: Draft,
) -> Result<Program, Error> {
    let mut compiler = Compiler {
        registry,
        program: Program {
            root: 0,
            nodes: Vec::new(),
            patterns: Vec::new(),
            dynamic: HashMap::new(),
            recursive: HashMap::new(),
        },
        known: HashMap::new(),
        queue: VecDeque::new(),
        resources: Vec::new(),
        resource_ids: HashMap::new(),
        pattern_numbers: HashMap::new(),
        pattern_bytes: 0,
        anchors: Vec::new(),
        recursive: false,
        linked: (0, 0),
    };
    let resource = compiler.resource(uri);
    compiler.program.root = compiler.node(Subschema { schema: document, resource, draft }, "")?;
    while !compiler.queue.is_empty() {
        while let Some((node, subschema, path)) = compiler.queue.pop_front() {
            compiler.program.nodes[node].checks = compiler.checks(subschema, &path)?;
        }
        compiler.link_anchors()?;
    }
    compiler.program.check_expansion().map_err(Error::TooComplex)?;
    Ok(compiler.program)
}

fn fault(pointer: &str, problem: String) -> Error {
    Error::DoesNotCompile(Violation::at(json_path(pointer), problem).to_string())
}

impl<'r> Compiler<'r> {
    fn resource(&mut self, uri: &Uri<String>) -> ResourceId {
        let id = *self.resource_ids.entry(uri.as_str().to_owned()).or_insert(self.resources.len());
        if id == self.resources.len() {
            self.resources.push(uri.clone());
        }
        id
    }

    /// Returns the number of a subschema. A new one is queued.
    fn node(&mut self, subschema: Subschema<'r>, path: &str) -> Result<NodeId, Error> {
        let address = std::ptr::from_ref(subschema.schema).addr();
        if let Some(known) = self.known.get(&address) {
            return Ok(*known);
        }
        let node = self.program.nodes.len();
        if node == limits::SCHEMA_NODES {
            return Err(Error::TooComplex(format!("more than {} subschemas", limits::SCHEMA_NODES)));
        }
        self.program.nodes.push(Node { resource: subschema.resource, ..Node::default() });
        self.known.insert(address, node);
        self.queue.push_back((node, subschema, path.to_owned()));
        Ok(node)
    }

    /// Returns the number of a subschema inside another one.
    fn inner(&mut self, outer: Subschema<'r>, schema: &'r Value, path: &str) -> Result<NodeId, Error> {
        let draft = outer.draft.detect(schema);
        if draft == Draft::Unknown {
            return Err(fault(&format!("{path}/$schema"), "not a known draft of JSON Schema".into()));
        }
        let own = draft.create_resource_ref(schema);
        let resource = match own.id() {
            None => outer.resource,
            Some(_) => {
                let resolver = self.registry.resolver(self.resources[outer.resource].clone());
                let resolver =
                    resolver.in_subresource(own).map_err(|error| fault(path, error.to_string()))?;
                self.resource(&resolver.base_uri())
            }
        };
        self.node(Subschema { schema, resource, draft }, path)
    }

    /// Returns the number of the target of a reference.
    fn target(&mut self, from: ResourceId, reference: &str, path: &str) -> Result<NodeId, Error> {
        let resolver = self.registry.resolver(self.resources[from].clone());
        let resolved = resolver.lookup(reference).map_err(|error| fault(path, error.to_string()))?;
        let (schema, resolver, draft) = resolved.into_inner();
        let draft = draft.detect(schema);
        if draft == Draft::Unknown || !(schema.is_object() || schema.is_boolean()) {
            return Err(fault(path, "a reference to something that is not a schema".into()));
        }
        let resource = self.resource(&resolver.base_uri());
        self.node(Subschema { schema, resource, draft }, path)
    }

    /// Finds the targets of dynamic references in every resource.
    fn link_anchors(&mut self) -> Result<(), Error> {
        let found = (self.resources.len(), self.anchors.len() + usize::from(self.recursive));
        if found == self.linked || found.1 == 0 {
            return Ok(());
        }
        if found.0.saturating_mul(found.1) > DYNAMIC_TARGETS {
            return Err(Error::TooComplex("too many dynamic anchors".into()));
        }
        self.linked = found;
        for resource in 0..found.0 {
            let resolver = self.registry.resolver(self.resources[resource].clone());
            for anchor in self.anchors.clone() {
                let Ok(resolved) = resolver.lookup(&format!("#{anchor}")) else { continue };
                if resolved.contents().get("$dynamicAnchor").and_then(Value::as_str) == Some(&anchor) {
                    let node = self.target(resource, &format!("#{anchor}"), "")?;
                    self.program.dynamic.insert((resource, anchor), node);
                }
            }
            if self.recursive
                && let Ok(resolved) = resolver.lookup("#")
                && resolved.contents().get("$recursiveAnchor") == Some(&Value::Bool(true))
            {
                let node = self.target(resource, "#", "")?;
                self.program.recursive.insert(resource, node);
            }
        }
        Ok(())
    }

    fn pattern(&mut self, text: &str, path: &str) -> Result<usize, Error> {
        if let Some(known) = self.pattern_numbers.get(text) {
            return Ok(*known);
        }
        let pattern = Pattern::new(text).map_err(|why| fault(path, why))?;
        self.pattern_bytes += pattern.bytes();
        if self.pattern_bytes > limits::SCHEMA_PATTERN_BYTES {
            let why = format!("patterns that need more than {} bytes", limits::SCHEMA_PATTERN_BYTES);
            return Err(Error::TooComplex(why));
        }
        self.program.patterns.push(pattern);
        self.pattern_numbers.insert(text.to_owned(), self.program.patterns.len() - 1);
        Ok(self.program.patterns.len() - 1)
    }

    fn checks(&mut self, subschema: Subschema<'r>, path: &str) -> Result<Vec<Check>, Error> {
        let schema = match subschema.schema {
            Value::Object(schema) => schema,
            Value::Bool(false) => return Ok(vec![Check::Never]),
            _ => return Ok(Vec::new()),
        };
        let alone = matches!(subschema.draft, Draft::Draft4 | Draft::Draft6 | Draft::Draft7);
        if let (true, Some(Value::String(reference))) = (alone, schema.get("$ref")) {
            // Until draft 7, a reference hides all other keywords.
            return Ok(vec![Check::Ref(self.target(
                subschema.resource,
                reference,
                &format!("{path}/$ref"),
            )?)]);
        }
        let mut checks = Vec::new();
        self.assertions(subschema.draft, schema, path, &mut checks)?;
        self.object_checks(subschema, schema, path, &mut checks)?;
        self.array_checks(subschema, schema, path, &mut checks)?;
        self.combinations(subschema, schema, path, &mut checks)?;
        self.references(subschema, schema, path, &mut checks)?;
        if !alone {
            for (keyword, check) in [
                ("unevaluatedItems", Check::UnevaluatedItems as fn(NodeId) -> Check),
                ("unevaluatedProperties", Check::UnevaluatedProperties),
            ] {
                if let Some(node) = self.one(subschema, schema, path, keyword)? {
                    checks.push(check(node));
                }
            }
        }
        Ok(checks)
    }

    /// Compiles the keywords that hold no subschemas.
    fn assertions(
        &mut self,
        draft: Draft,
        schema: &Map<String, Value>,
        path: &str,
        checks: &mut Vec<Check>,
    ) -> Result<(), Error> {
        for (keyword, value) in schema {
            let count =
                |bound, check: fn(Bound, u64) -> Check| natural(value).map(|limit| check(bound, limit));
            let check = match (keyword.as_str(), value) {
                ("type", _) => types(value, draft).map(Check::Type),
                ("enum", Value::Array(options)) => {
                    Some(Check::Enum { size: super::value::size(value), options: options.clone() })
                }
                ("const", _) if draft != Draft::Draft4 => {
                    Some(Check::Const { size: super::value::size(value), value: value.clone() })
                }
                ("multipleOf", Value::Number(number)) => Some(Check::MultipleOf(number.clone())),
                ("minLength", _) => count(Bound::Min, Check::Length),
                ("maxLength", _) => count(Bound::Max, Check::Length),
                ("minItems", _) => count(Bound::Min, Check::Items),
                ("maxItems", _) => count(Bound::Max, Check::Items),
                ("minProperties", _) => count(Bound::Min, Check::Properties),
                ("maxProperties", _) => count(Bound::Max, Check::Properties),
                ("uniqueItems", Value::Bool(true)) => Some(Check::UniqueItems),
                ("required", Value::Array(names)) => Some(Check::Required(texts(names))),
                ("pattern", Value::String(text)) => {
                    Some(Check::Pattern(self.pattern(text, &format!("{path}/pattern"))?))
                }
                ("dependentRequired", Value::Object(lists)) => {
                    Some(Check::DependentRequired(required(lists)))
                }
                ("dependencies", Value::Object(lists)) => Some(Check::DependentRequired(required(lists))),
                (_, Value::Number(limit)) => {
                    numeric(keyword, schema).map(|bound| Check::Bound(bound, limit.clone()))
                }
                _ => None,
            };
            checks.extend(check);
        }
        Ok(())
    }

    fn object_checks(
        &mut self,
        subschema: Subschema<'r>,
        schema: &'r Map<String, Value>,
        path: &str,
        checks: &mut Vec<Check>,
    ) -> Result<(), Error> {
        let named = self.map(subschema, schema, path, "properties")?;
        let mut patterns = Vec::new();
        for (text, node) in self.map(subschema, schema, path, "patternProperties")? {
            patterns.push((self.pattern(&text, &format!("{path}/patternProperties"))?, node));
        }
        let additional = self.one(subschema, schema, path, "additionalProperties")?;
        if !named.is_empty() || !patterns.is_empty() || additional.is_some() {
            let named: BTreeMap<String, NodeId> = named.into_iter().collect();
            checks.push(Check::Object { named, patterns, additional });
        }
        if subschema.draft != Draft::Draft4 {
            checks.extend(self.one(subschema, schema, path, "propertyNames")?.map(Check::PropertyNames));
        }
        let mut dependent = self.map(subschema, schema, path, "dependencies")?;
        dependent.extend(self.map(subschema, schema, path, "dependentSchemas")?);
        if !dependent.is_empty() {
            checks.push(Check::DependentSchemas(dependent));
        }
        Ok(())
    }

    fn array_checks(
        &mut self,
        subschema: Subschema<'r>,
        schema: &'r Map<String, Value>,
        path: &str,
        checks: &mut Vec<Check>,
    ) -> Result<(), Error> {
        let modern = subschema.draft == Draft::Draft202012;
        let (prefix, rest) = match schema.get("items") {
            Some(Value::Array(_)) if !modern => (
                self.list(subschema, schema, path, "items")?,
                self.one(subschema, schema, path, "additionalItems")?,
            ),
            _ if modern => (
                self.list(subschema, schema, path, "prefixItems")?,
                self.one(subschema, schema, path, "items")?,
            ),
            _ => (Vec::new(), self.one(subschema, schema, path, "items")?),
        };
        if !prefix.is_empty() || rest.is_some() {
            checks.push(Check::Array { prefix, rest });
        }
        if subschema.draft == Draft::Draft4 {
            return Ok(());
        }
        if let Some(node) = self.one(subschema, schema, path, "contains")? {
            let limit = |keyword| match subschema.draft {
                Draft::Draft6 | Draft::Draft7 => None,
                _ => schema.get(keyword).and_then(natural),
            };
            let (min, max) = (limit("minContains").unwrap_or(1), limit("maxContains"));
            checks.push(Check::Contains { node, min, max, marks: modern });
        }
        Ok(())
    }

    fn combinations(
        &mut self,
        subschema: Subschema<'r>,
        schema: &'r Map<String, Value>,
        path: &str,
        checks: &mut Vec<Check>,
    ) -> Result<(), Error> {
        for (keyword, check) in [
            ("allOf", Check::AllOf as fn(Vec<NodeId>) -> Check),
            ("anyOf", Check::AnyOf),
            ("oneOf", Check::OneOf),
        ] {
            if schema.get(keyword).is_some_and(Value::is_array) {
                checks.push(check(self.list(subschema, schema, path, keyword)?));
            }
        }
        checks.extend(self.one(subschema, schema, path, "not")?.map(Check::Not));
        if matches!(subschema.draft, Draft::Draft4 | Draft::Draft6) {
            return Ok(());
        }
        if let Some(condition) = self.one(subschema, schema, path, "if")? {
            let then = self.one(subschema, schema, path, "then")?;
            let otherwise = self.one(subschema, schema, path, "else")?;
            checks.push(Check::If { condition, then, otherwise });
        }
        Ok(())
    }

    fn references(
        &mut self,
        subschema: Subschema<'r>,
        schema: &'r Map<String, Value>,
        path: &str,
        checks: &mut Vec<Check>,
    ) -> Result<(), Error> {
        let text = |keyword| schema.get(keyword).and_then(Value::as_str);
        if let Some(reference) = text("$ref") {
            checks.push(Check::Ref(self.target(subschema.resource, reference, &format!("{path}/$ref"))?));
        }
        if let (Some(reference), Draft::Draft202012) = (text("$dynamicRef"), subschema.draft) {
            let target = self.target(subschema.resource, reference, &format!("{path}/$dynamicRef"))?;
            let anchor = reference.rsplit_once('#').map_or("", |(_, anchor)| anchor);
            let resolver = self.registry.resolver(self.resources[subschema.resource].clone());
            let is_dynamic = resolver.lookup(reference).is_ok_and(|resolved| {
                resolved.contents().get("$dynamicAnchor").and_then(Value::as_str) == Some(anchor)
            });
            if is_dynamic {
                if !self.anchors.iter().any(|known| known == anchor) {
                    self.anchors.push(anchor.to_owned());
                }
                checks.push(Check::DynamicRef { target, anchor: anchor.to_owned() });
            } else {
                checks.push(Check::Ref(target));
            }
        }
        if let (Some(reference), Draft::Draft201909) = (text("$recursiveRef"), subschema.draft) {
            let target = self.target(subschema.resource, reference, &format!("{path}/$recursiveRef"))?;
            self.recursive = true;
            checks.push(Check::RecursiveRef { target });
        }
        Ok(())
    }

    /// Compiles the subschema that is the value of a keyword.
    fn one(
        &mut self,
        subschema: Subschema<'r>,
        schema: &'r Map<String, Value>,
        path: &str,
        keyword: &str,
    ) -> Result<Option<NodeId>, Error> {
        match schema.get(keyword) {
            Some(inner @ (Value::Object(_) | Value::Bool(_))) => {
                self.inner(subschema, inner, &format!("{path}/{keyword}")).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Compiles the subschemas in the list that is the value of a keyword.
    fn list(
        &mut self,
        subschema: Subschema<'r>,
        schema: &'r Map<String, Value>,
        path: &str,
        keyword: &str,
    ) -> Result<Vec<NodeId>, Error> {
        let Some(Value::Array(list)) = schema.get(keyword) else { return Ok(Vec::new()) };
        let inner = list.iter().enumerate();
        inner
            .map(|(index, inner)| self.inner(subschema, inner, &format!("{path}/{keyword}/{index}")))
            .collect()
    }

    /// Compiles the subschemas in the object that is the value of a keyword.
    fn map(
        &mut self,
        subschema: Subschema<'r>,
        schema: &'r Map<String, Value>,
        path: &str,
        keyword: &str,
    ) -> Result<Vec<(String, NodeId)>, Error> {
        let Some(Value::Object(map)) = schema.get(keyword) else { return Ok(Vec::new()) };
        let inner = map.iter().filter(|(_, inner)| inner.is_object() || inner.is_boolean());
        let compiled = inner.map(|(name, inner)| {
            let escaped = name.replace('~', "~0").replace('/', "~1");
            Ok((name.clone(), self.inner(subschema, inner, &format!("{path}/{keyword}/{escaped}"))?))
        });
        compiled.collect()
    }
}

fn texts(names: &[Value]) -> Vec<String> {
    names.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Returns the lists of names in the value of `dependentRequired` or `dependencies`.
fn required(lists: &Map<String, Value>) -> Vec<(String, Vec<String>)> {
    let list = |(name, list): (&String, &Value)| Some((name.clone(), texts(list.as_array()?)));
    lists.iter().filter_map(list).collect()
}

/// Returns the bound that a numeric keyword sets. In draft 4, a second keyword makes it exclusive.
fn numeric(keyword: &str, schema: &Map<String, Value>) -> Option<Bound> {
    let exclusive = |keyword: &str| schema.get(keyword) == Some(&Value::Bool(true));
    Some(match keyword {
        "minimum" if exclusive("exclusiveMinimum") => Bound::ExclusiveMin,
        "maximum" if exclusive("exclusiveMaximum") => Bound::ExclusiveMax,
        "minimum" => Bound::Min,
        "maximum" => Bound::Max,
        "exclusiveMinimum" => Bound::ExclusiveMin,
        "exclusiveMaximum" => Bound::ExclusiveMax,
        _ => return None,
    })
}

/// Returns a number of items, properties or characters. It may be written as `2.0`.
fn natural(value: &Value) -> Option<u64> {
    let number = value.as_f64().filter(|number| number.fract() == 0.0 && *number >= 0.0);
    value.as_u64().or(number.map(|number| number as u64))
}

fn types(value: &Value, draft: Draft) -> Option<Types> {
    let names = match value {
        Value::String(name) => vec![name.clone()],
        Value::Array(names) => texts(names),
        _ => return None,
    };
    Some(Types { names, written_integers: draft == Draft::Draft4 })
}
