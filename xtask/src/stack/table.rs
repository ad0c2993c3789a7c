//! Finds reads of the global offset table.

use super::image::Image;
use iced_x86::{Decoder, DecoderOptions, FlowControl, InstructionInfoFactory, OpAccess, Register};

/// Returns the address of the first instruction that reads the global offset table, on the fast
/// path that begins at `start`. The fast path ends with the first return. The compiler puts slow
/// paths behind it, so it takes no jump before.
pub fn first_read(image: &Image, start: u64) -> Option<u64> {
    let code = image.code(start)?;
    let mut factory = InstructionInfoFactory::new();
    Decoder::with_ip(64, code, start, DecoderOptions::NONE)
        .into_iter()
        .take_while(|instruction| instruction.flow_control() != FlowControl::Return)
        .find(|instruction| {
            let info = factory.info(instruction);
            let mut reads = info
                .used_memory()
                .iter()
                .filter(|memory| memory.base() == Register::RIP || memory.base() == Register::None);
            reads.any(|memory| {
                memory.access() == OpAccess::Read
                    && memory.segment() != Register::FS
                    && image.is_in_table(memory.displacement())
            })
        })
        .map(|instruction| instruction.ip())
}
