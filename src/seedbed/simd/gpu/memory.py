"""The memory of a thread on an NVIDIA GPU: its own arrays, and constant arrays that all threads read."""

from __future__ import annotations

from seedbed.simd.ir.program import Unsupported

MOST_LOCAL = 256 << 10
"""The most bytes of arrays of a thread; with spilled registers, the hardware's own limit is twice that."""
MOST_CONSTANT = 64 << 10
"""The size of `.const`, the memory whose cache serves a warp at once if all its threads read one address."""
ALIGN = 4


class DeviceMemory:
    """The places of arrays: `.local` for a thread's own, `.const` for tables, `.global` if that is full."""

    bool_bits = 8

    def __init__(self) -> None:
        """Starts with no memory taken."""
        self.local, self.constant = 0, 0  # bytes taken

    def place(self, size: int, array: str) -> str:
        """Takes `size` bytes for an array of LLVM type `array`; returns the instruction for its address.

        Raises Unsupported if the arrays then take more than MOST_LOCAL.
        """
        self.local += size
        if self.local > MOST_LOCAL:
            raise Unsupported(
                f"the arrays that loops index or write down take more than {MOST_LOCAL >> 10} KiB for one "
                "example, the most on a GPU: use smaller arrays or shorter loops"
            )
        return f"alloca {array}, align {ALIGN}"

    def table(self, name: str, size: int, constants: str) -> tuple[str, str]:
        """Returns the definition of a constant array of `size` bytes, and the operand for its address."""
        space = 1
        if self.constant + size <= MOST_CONSTANT:
            self.constant += size
            space = 4
        definition = f"{name} = internal addrspace({space}) constant {constants}, align {ALIGN}"
        return definition, f"addrspacecast (ptr addrspace({space}) {name} to ptr)"
