//! Tests of the rules as tables: the effect of each input in each phase, and a table for each rule. [`notation`] describes
//! the format of the tables.

#![allow(clippy::unwrap_used)]

mod approval;
mod backlog;
mod budget;
mod built_in;
mod callbacks;
mod calls;
mod clock;
mod closing;
mod conversation;
mod events;
mod facts;
mod failures;
mod fork;
mod ids;
#[path = "../items/mod.rs"]
mod items;
mod notation;
mod phases;
mod random;
mod schedules;
mod sleeps;
mod stored;
mod summary;
mod turn_limit;
