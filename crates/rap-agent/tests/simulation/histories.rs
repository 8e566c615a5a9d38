//! The histories that the simulation makes, for tests of what is made from histories: prompts.

use std::cell::RefCell;
use std::rc::Rc;

use rap_agent::Entry;

use super::chaos::Chaos;
use super::fault::Fault;

/// Gives each history that a question to the model covers in the run of a seed, what is inherited included, and at the
/// end the whole history of each thread, whatever it is doing.
pub fn each(seed: u64, see: impl FnMut(&[&Entry]) + 'static) {
    let see = Rc::new(RefCell::new(see));
    let mut chaos = Chaos::new(seed, Fault::None);
    let visitor = Rc::clone(&see);
    chaos.world.visitor = Some(Box::new(move |history| (visitor.borrow_mut())(history)));
    if let Err(broken) = chaos.run() {
        panic!("seed {seed}: {}", broken.0);
    }
    let disk = &chaos.world.disk;
    for (thread, row) in disk.threads.iter().enumerate() {
        (see.borrow_mut())(&disk.visible(thread, row.last()));
    }
}
