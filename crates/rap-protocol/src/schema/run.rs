//! Validates a value against a program, within a budget.
//!
//! The first pass only finds out whether the value is valid and ends at the first violation. The second pass takes the
//! same steps in the same order and records violations, so it finds the first one at the same cost. Subschemas that may
//! fail without making the value invalid, such as those of `anyOf`, record nothing.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::Violation;
use super::budget::{Budget, Stop};
use super::pattern::Caches;
use super::program::{Bound, Check, NodeId, Program, ResourceId};
use super::value::{self, BYTES_PER_STEP, shown};
use crate::invalid::Path;
use crate::limits;

/// Steps that recording violations may take in addition to those of the first pass.
const REPORT_STEPS: u64 = 10_000;
/// Steps that it takes to remember that an item or a property was evaluated.
const REMEMBER_STEPS: u64 = 16;

/// Addresses of the items and properties of a value that subschemas have evaluated.
type Evaluated = HashSet<usize>;

struct Run<'p, 'b> {
    program: &'p Program,
    budget: &'b mut Budget,
    caches: Caches,
    /// Resources of the subschemas that are being applied, outermost first.
    scope: Vec<ResourceId>,
    depth: usize,
    /// `None` while violations are not recorded.
    report: Option<Report>,
}

#[derive(Default)]
struct Report {
    path: Vec<Segment>,
    violations: Vec<Violation>,
}

enum Segment {
    Field(String),
    Item(usize),
}

/// Returns the violations of a program by a value. There are none if the value is valid.
pub(super) fn violations(
    program: &Program,
    value: &Value,
    budget: &mut Budget,
) -> Result<Vec<Violation>, Stop> {
    let before = budget.left();
    let (valid, _) = run(program, value, budget, None);
    if valid? {
        return Ok(Vec::new());
    }
    let mut budget = budget.again(before - budget.left() + REPORT_STEPS);
    let (ended, report) = run(program, value, &mut budget, Some(Report::default()));
    let mut violations = report.unwrap_or_default().violations;
    if ended == Err(Stop::Flag) {
        return Err(Stop::Flag);
    }
    if violations.is_empty() {
        violations.push(Violation::at("$".into(), "the value does not match the schema".into()));
    }
    Ok(violations)
}

fn run(
    program: &Program,
    value: &Value,
    budget: &mut Budget,
    report: Option<Report>,
) -> (Result<bool, Stop>, Option<Report>) {
    let mut run = Run { program, budget, caches: Caches::default(), scope: Vec::new(), depth: 0, report };
    let ended = run.apply(program.root, value, None);
    (ended, run.report)
}

impl Run<'_, '_> {
    /// Applies a subschema. `seen` collects the evaluated items and properties, if someone asks for them.
    fn apply(&mut self, node: NodeId, value: &Value, seen: Option<&mut Evaluated>) -> Result<bool, Stop> {
        self.budget.spend(1)?;
        if self.depth == limits::VALIDATION_DEPTH {
            return Err(Stop::TooDeep);
        }
        let node = &self.program.nodes[node];
        let entered = self.scope.last() != Some(&node.resource);
        if entered {
            self.scope.push(node.resource);
        }
        self.depth += 1;
        let valid = if node.is_unevaluated() {
            let mut own = Evaluated::new();
            let valid = self.all_checks(&node.checks, value, &mut Some(&mut own))?;
            if let (true, Some(seen)) = (valid, seen) {
                self.merge(seen, own)?;
            }
            valid
        } else {
            let mut seen = seen;
            self.all_checks(&node.checks, value, &mut seen)?
        };
        self.depth -= 1;
        if entered {
            self.scope.pop();
        }
        Ok(valid)
    }

    fn all_checks(
        &mut self,
        checks: &[Check],
        value: &Value,
        seen: &mut Option<&mut Evaluated>,
    ) -> Result<bool, Stop> {
        let mut valid = true;
        for check in checks {
            self.budget.spend(1)?;
            valid &= self.check(check, value, seen)?;
            if !valid && self.report.is_none() {
                break;
            }
        }
        Ok(valid)
    }

    fn check(
        &mut self,
        check: &Check,
        value: &Value,
        seen: &mut Option<&mut Evaluated>,
    ) -> Result<bool, Stop> {
        match (check, value) {
            (Check::AllOf(nodes), _) => self.every(nodes.iter().copied(), value, seen),
            (Check::Ref(node), _) => self.apply(*node, value, seen.as_deref_mut()),
            (Check::DynamicRef { target, anchor }, _) => {
                self.budget.spend(self.scope.len() as u64)?;
                let outermost =
                    |resource: &ResourceId| self.program.dynamic.get(&(*resource, anchor.clone()));
                let node = *self.scope.iter().find_map(outermost).unwrap_or(target);
                self.apply(node, value, seen.as_deref_mut())
            }
            (Check::RecursiveRef { target }, _) => {
                self.budget.spend(self.scope.len() as u64)?;
                let recursive = |resource: &ResourceId| self.program.recursive.get(resource);
                let node = *self.scope.iter().rev().map_while(recursive).last().unwrap_or(target);
                self.apply(node, value, seen.as_deref_mut())
            }
            (Check::AnyOf(nodes), _) => self.any_of(nodes, value, seen),
            (Check::OneOf(nodes), _) => self.one_of(nodes, value, seen),
            (Check::Not(node), _) => {
                let valid = !self.quiet(*node, value, None)?;
                self.outcome(valid, || format!("{} is not allowed", shown(value)))
            }
            (Check::If { condition, then, otherwise }, _) => {
                let holds = self.tolerated(*condition, value, seen)?;
                let next = if holds { then } else { otherwise };
                self.every(next.iter().copied(), value, seen)
            }
            (Check::DependentSchemas(dependent), Value::Object(fields)) => {
                self.budget.spend(dependent.len() as u64)?;
                let present = dependent.iter().filter(|(name, _)| fields.contains_key(name));
                self.every(present.map(|(_, node)| *node), value, seen)
            }
            (Check::Object { .. }, Value::Object(fields)) => self.properties(check, fields, seen),
            (Check::PropertyNames(node), Value::Object(fields)) => self.names(*node, fields),
            (Check::UnevaluatedProperties(node), Value::Object(fields)) => {
                let entries = fields.iter().map(|(name, value)| (Segment::Field(name.clone()), value));
                self.unevaluated(*node, entries, seen)
            }
            (Check::Array { prefix, rest }, Value::Array(items)) => {
                let nodes = prefix.iter().copied().map(Some).chain(std::iter::repeat(*rest));
                let mut valid = true;
                for (index, (item, node)) in items.iter().zip(nodes).enumerate() {
                    let Some(node) = node else { break };
                    valid &= self.child(node, || Segment::Item(index), item, seen)?;
                    if !valid && self.report.is_none() {
                        break;
                    }
                }
                Ok(valid)
            }
            (Check::Contains { node, min, max, marks }, Value::Array(items)) => {
                self.contains(*node, (*min, *max), items, seen.as_deref_mut().filter(|_| *marks))
            }
            (Check::UnevaluatedItems(node), Value::Array(items)) => {
                let entries = items.iter().enumerate().map(|(index, item)| (Segment::Item(index), item));
                self.unevaluated(*node, entries, seen)
            }
            _ => self.assertion(check, value),
        }
    }

    /// Checks a keyword that holds no subschemas.
    fn assertion(&mut self, check: &Check, value: &Value) -> Result<bool, Stop> {
        let text = |value: &Value| shown(value);
        match (check, value) {
            (Check::Never, _) => self.outcome(false, || format!("{} is not allowed here", text(value))),
            (Check::Type(types), _) => self.outcome(types.contain(value), || {
                let names: Vec<String> = types.names.iter().map(|name| format!("{name:?}")).collect();
                let plural = if names.len() == 1 { "" } else { "s" };
                format!("{} is not of type{plural} {}", text(value), names.join(", "))
            }),
            (Check::Enum { options, size }, _) => {
                self.budget.spend(*size)?;
                let valid = options.iter().any(|option| value::order(option, value).is_eq());
                self.outcome(valid, || {
                    let options: Vec<String> = options.iter().take(20).map(shown).collect();
                    format!("{} is not one of {}", text(value), options.join(", "))
                })
            }
            (Check::Const { value: expected, size }, _) => {
                self.budget.spend(*size)?;
                let valid = value::order(expected, value).is_eq();
                self.outcome(valid, || format!("{} was expected", text(expected)))
            }
            (Check::Bound(bound, limit), Value::Number(number)) => {
                let order = value::order_numbers(number, limit);
                let (valid, words) = match bound {
                    Bound::Min => (order.is_ge(), "less than the minimum"),
                    Bound::Max => (order.is_le(), "greater than the maximum"),
                    Bound::ExclusiveMin => (order.is_gt(), "less than or equal to the minimum"),
                    Bound::ExclusiveMax => (order.is_lt(), "greater than or equal to the maximum"),
                };
                self.outcome(valid, || format!("{number} is {words} of {limit}"))
            }
            (Check::MultipleOf(divisor), Value::Number(number)) => {
                let valid = jsonschema_value::numeric_check::satisfies_multiple_of(divisor, number);
                self.outcome(valid, || format!("{number} is not a multiple of {divisor}"))
            }
            (Check::Length(bound, limit), Value::String(string)) => {
                self.budget.spend(string.len() as u64 / BYTES_PER_STEP)?;
                let words = ("shorter than", "longer than", "character", "characters");
                self.count(*bound, *limit, string.chars().count(), value, words)
            }
            (Check::Items(bound, limit), Value::Array(items)) => {
                self.count(*bound, *limit, items.len(), value, ("less than", "more than", "item", "items"))
            }
            (Check::Properties(bound, limit), Value::Object(fields)) => {
                let words = ("less than", "more than", "property", "properties");
                self.count(*bound, *limit, fields.len(), value, words)
            }
            (Check::Pattern(number), Value::String(string)) => {
                let pattern = &self.program.patterns[*number];
                let valid = pattern.is_match(*number, string, &mut self.caches, self.budget)?;
                self.outcome(valid, || format!("{} does not match \"{}\"", text(value), pattern.text))
            }
            (Check::UniqueItems, Value::Array(items)) => {
                let valid = self.are_unique(items)?;
                self.outcome(valid, || format!("{} has items that are equal", text(value)))
            }
            (Check::Required(names), Value::Object(fields)) => self.required(names, fields),
            (Check::DependentRequired(lists), Value::Object(fields)) => {
                let mut valid = true;
                for (name, names) in lists {
                    self.budget.spend(1)?;
                    valid &= !fields.contains_key(name) || self.required(names, fields)?;
                }
                Ok(valid)
            }
            _ => Ok(true),
        }
    }

    /// Records a violation unless `valid`. Returns `valid`.
    fn outcome(&mut self, valid: bool, text: impl FnOnce() -> String) -> Result<bool, Stop> {
        if let (false, Some(report)) = (valid, &mut self.report) {
            report.violations.push(Violation::at(report.path(), text()));
            if report.violations.len() == limits::VIOLATIONS {
                return Err(Stop::Enough);
            }
        }
        Ok(valid)
    }

    fn count(
        &mut self,
        bound: Bound,
        limit: u64,
        count: usize,
        value: &Value,
        (less, more, one, many): (&str, &str, &str, &str),
    ) -> Result<bool, Stop> {
        let (valid, words) = match bound {
            Bound::Min | Bound::ExclusiveMin => (count as u64 >= limit, less),
            Bound::Max | Bound::ExclusiveMax => (count as u64 <= limit, more),
        };
        let unit = if limit == 1 { one } else { many };
        let verb = if one == "character" { "is" } else { "has" };
        self.outcome(valid, || format!("{} {verb} {words} {limit} {unit}", shown(value)))
    }

    fn required(&mut self, names: &[String], fields: &Map<String, Value>) -> Result<bool, Stop> {
        let mut valid = true;
        for name in names {
            self.budget.spend(1)?;
            valid &= self.outcome(fields.contains_key(name), || {
                format!("{} is a required property", shown(&Value::from(name.as_str())))
            })?;
        }
        Ok(valid)
    }

    /// Returns true if no two items are equal. They are sorted, at the cost of comparing each in every round.
    fn are_unique(&mut self, items: &[Value]) -> Result<bool, Stop> {
        self.budget.spend(items.len() as u64)?;
        let rounds = u64::from(items.len().max(1).ilog2() + 1);
        for item in items {
            self.budget.spend(value::size(item).saturating_mul(rounds))?;
        }
        let mut sorted: Vec<&Value> = items.iter().collect();
        sorted.sort_unstable_by(|left, right| value::order(left, right));
        Ok(sorted.windows(2).all(|pair| value::order(pair[0], pair[1]).is_ne()))
    }

    /// Applies subschemas that all have to hold.
    fn every(
        &mut self,
        nodes: impl Iterator<Item = NodeId>,
        value: &Value,
        seen: &mut Option<&mut Evaluated>,
    ) -> Result<bool, Stop> {
        let mut valid = true;
        for node in nodes {
            valid &= self.apply(node, value, seen.as_deref_mut())?;
            if !valid && self.report.is_none() {
                break;
            }
        }
        Ok(valid)
    }

    fn any_of(
        &mut self,
        nodes: &[NodeId],
        value: &Value,
        seen: &mut Option<&mut Evaluated>,
    ) -> Result<bool, Stop> {
        let mut valid = false;
        for node in nodes {
            valid |= self.tolerated(*node, value, seen)?;
            // All that hold count as having evaluated their properties.
            if valid && seen.is_none() {
                break;
            }
        }
        self.outcome(valid, || {
            format!("{} is not valid under any of the schemas listed in the 'anyOf' keyword", shown(value))
        })
    }

    fn one_of(
        &mut self,
        nodes: &[NodeId],
        value: &Value,
        seen: &mut Option<&mut Evaluated>,
    ) -> Result<bool, Stop> {
        let mut holding = 0;
        for node in nodes {
            holding += usize::from(self.tolerated(*node, value, seen)?);
            if holding > 1 {
                break;
            }
        }
        self.outcome(holding == 1, || {
            let how = if holding == 0 { "not valid under any" } else { "valid under more than one" };
            format!("{} is {how} of the schemas listed in the 'oneOf' keyword", shown(value))
        })
    }

    /// Applies a subschema that may fail. It then counts as having evaluated nothing.
    fn tolerated(
        &mut self,
        node: NodeId,
        value: &Value,
        seen: &mut Option<&mut Evaluated>,
    ) -> Result<bool, Stop> {
        let Some(seen) = seen else { return self.quiet(node, value, None) };
        let mut own = Evaluated::new();
        let valid = self.quiet(node, value, Some(&mut own))?;
        if valid {
            self.merge(seen, own)?;
        }
        Ok(valid)
    }

    /// Applies a subschema without recording violations.
    fn quiet(&mut self, node: NodeId, value: &Value, seen: Option<&mut Evaluated>) -> Result<bool, Stop> {
        let report = self.report.take();
        let valid = self.apply(node, value, seen);
        self.report = report;
        valid
    }

    fn merge(&mut self, seen: &mut Evaluated, own: Evaluated) -> Result<(), Stop> {
        self.budget.spend(REMEMBER_STEPS * own.len() as u64)?;
        seen.extend(own);
        Ok(())
    }

    /// Applies a subschema to an item or a property.
    fn child(
        &mut self,
        node: NodeId,
        segment: impl FnOnce() -> Segment,
        value: &Value,
        seen: &mut Option<&mut Evaluated>,
    ) -> Result<bool, Stop> {
        if let Some(seen) = seen {
            self.budget.spend(REMEMBER_STEPS)?;
            seen.insert(address(value));
        }
        if let Some(report) = &mut self.report {
            report.path.push(segment());
        }
        let valid = self.apply(node, value, None)?;
        if let Some(report) = &mut self.report {
            report.path.pop();
        }
        Ok(valid)
    }

    fn properties(
        &mut self,
        check: &Check,
        fields: &Map<String, Value>,
        seen: &mut Option<&mut Evaluated>,
    ) -> Result<bool, Stop> {
        let Check::Object { named, patterns, additional } = check else { return Ok(true) };
        let mut valid = true;
        for (name, value) in fields {
            self.budget.spend(1 + name.len() as u64 / BYTES_PER_STEP)?;
            let segment = || Segment::Field(name.clone());
            let mut matched = false;
            if let Some(node) = named.get(name) {
                matched = true;
                valid &= self.child(*node, segment, value, seen)?;
            }
            for (number, node) in patterns {
                let pattern = &self.program.patterns[*number];
                if pattern.is_match(*number, name, &mut self.caches, self.budget)? {
                    matched = true;
                    valid &= self.child(*node, segment, value, seen)?;
                }
            }
            if let (false, Some(node)) = (matched, additional) {
                valid &= self.other(*node, "Additional properties", segment, value, seen)?;
            }
            if !valid && self.report.is_none() {
                break;
            }
        }
        Ok(valid)
    }

    /// Applies a subschema for items or properties that are not named. It is often `false`.
    fn other(
        &mut self,
        node: NodeId,
        kind: &str,
        segment: impl FnOnce() -> Segment,
        value: &Value,
        seen: &mut Option<&mut Evaluated>,
    ) -> Result<bool, Stop> {
        if !matches!(self.program.nodes[node].checks.as_slice(), [Check::Never]) {
            return self.child(node, segment, value, seen);
        }
        self.budget.spend(1)?;
        self.outcome(false, || {
            let name = match segment() {
                Segment::Field(name) => shown(&Value::from(name)),
                Segment::Item(index) => format!("[{index}]"),
            };
            format!("{kind} are not allowed ({name} was unexpected)")
        })
    }

    fn names(&mut self, node: NodeId, fields: &Map<String, Value>) -> Result<bool, Stop> {
        let mut valid = true;
        for name in fields.keys() {
            self.budget.spend(1 + name.len() as u64 / BYTES_PER_STEP)?;
            let name = Value::from(name.as_str());
            let fits = self.quiet(node, &name, None)?;
            valid &=
                self.outcome(fits, || format!("{} is not allowed as the name of a property", shown(&name)))?;
            if !valid && self.report.is_none() {
                break;
            }
        }
        Ok(valid)
    }

    fn contains(
        &mut self,
        node: NodeId,
        (min, max): (u64, Option<u64>),
        items: &[Value],
        mut seen: Option<&mut Evaluated>,
    ) -> Result<bool, Stop> {
        let mut count = 0;
        for item in items {
            if self.quiet(node, item, None)? {
                count += 1;
                if let Some(seen) = &mut seen {
                    self.budget.spend(REMEMBER_STEPS)?;
                    seen.insert(address(item));
                } else if max.is_none() && count >= min {
                    break;
                }
            }
        }
        let valid = count >= min && max.is_none_or(|max| count <= max);
        self.outcome(valid, || match max {
            Some(max) if count > max => format!("more than {max} items fit the schema of 'contains'"),
            _ => format!("less than {min} items fit the schema of 'contains'"),
        })
    }

    /// Applies a subschema to the items or properties that no other subschema has evaluated.
    fn unevaluated<'v>(
        &mut self,
        node: NodeId,
        entries: impl Iterator<Item = (Segment, &'v Value)>,
        seen: &mut Option<&mut Evaluated>,
    ) -> Result<bool, Stop> {
        let mut valid = true;
        for (segment, value) in entries {
            self.budget.spend(1)?;
            if seen.as_ref().is_some_and(|seen| seen.contains(&address(value))) {
                continue;
            }
            let kind = if matches!(segment, Segment::Item(_)) {
                "Unevaluated items"
            } else {
                "Unevaluated properties"
            };
            valid &= self.other(node, kind, || segment, value, seen)?;
            if !valid && self.report.is_none() {
                break;
            }
        }
        Ok(valid)
    }
}

impl Report {
    fn path(&self) -> String {
        fn extend(parent: &Path<'_>, rest: &[Segment]) -> String {
            match rest.split_first() {
                None => parent.to_string(),
                Some((Segment::Field(name), rest)) => extend(&parent.field(name), rest),
                Some((Segment::Item(index), rest)) => extend(&parent.item(*index), rest),
            }
        }
        extend(&Path::Root, &self.path)
    }
}

fn address(value: &Value) -> usize {
    std::ptr::from_ref(value).addr()
}
