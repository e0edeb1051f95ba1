"""Counts how many values of up to 32 bits a function in LLVM assembly holds at once."""

import llvmlite.binding as llvm

from .lanes import make_machine

COUNTED = {"float", "half", "bfloat", "i32", "i16", "i8"}

Names = set[str]


def count_live_values(assembly: str) -> int:
    """The most values of `COUNTED` types that are needed later, over all places of all functions.

    What the compiler of another processor made of a kernel: an estimate of the registers a lane
    needs, without those for 64-bit addresses.
    """
    module = llvm.parse_assembly(assembly)
    passes = llvm.create_new_module_pass_manager()
    passes.add_instruction_namer_pass()
    builder = llvm.create_pass_builder(make_machine(), llvm.create_pipeline_tuning_options())
    passes.run(module, builder)
    return max(_count(each) for each in module.functions if not each.is_declaration)


def _count(function: llvm.ValueRef) -> int:
    blocks = {block.name: list(block.instructions) for block in function.blocks}
    counted = {each.name for each in function.arguments if str(each.type) in COUNTED}
    for instructions in blocks.values():
        counted |= {each.name for each in instructions if str(each.type) in COUNTED}

    needed = {name: Names() for name in blocks}  # where a block begins
    most = 0
    is_settled = False
    while not is_settled:
        is_settled = True
        for name, instructions in reversed(blocks.items()):
            live = Names()
            for operand in instructions[-1].operands:
                if operand.name in blocks:
                    live |= _pass_on(blocks[operand.name], needed[operand.name], name)
            live &= counted
            for each in reversed(instructions):
                most = max(most, len(live))
                live.discard(each.name)
                if each.opcode != "phi":
                    live |= {operand.name for operand in each.operands} & counted
            if live != needed[name]:
                needed[name] = live
                is_settled = False
    return most


def _pass_on(block: list[llvm.ValueRef], needed: Names, before: str) -> Names:
    """What a block needs when the block `before` it ends."""
    passed = set(needed)
    for each in block:
        if each.opcode == "phi":
            passed.discard(each.name)
            for value, origin in zip(each.operands, each.incoming_blocks, strict=True):
                if origin.name == before:
                    passed.add(value.name)
    return passed
