//! The rules, as tables: what each input does to a thread in each phase, and a table for each rule. How a line is read is
//! described in [`notation`].

#![allow(clippy::unwrap_used)]

mod any;
mod approval;
mod awake;
mod backlog;
mod budget;
mod built_in;
mod callbacks;
mod calls;
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
mod schedules;
mod sleeps;
mod stored;
mod summary;
