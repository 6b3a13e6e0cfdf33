"""A program as a `torch.nn.Module` on a DeviceMesh, forward and backward."""

from meshdsl.backends.module.program_module import ProgramModule, module, module_of

__all__ = ["ProgramModule", "module", "module_of"]
