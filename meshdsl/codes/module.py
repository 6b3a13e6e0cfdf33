"""MD0560 to MD0569: a program as a `torch.nn.Module` on a DeviceMesh."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = (
    Code(
        "MD0560",
        "a DeviceMesh that does not fit",
        "The dims of a DeviceMesh are the axes of the mesh: they need the names that the layout "
        "uses and, for a plan that was made before, its sizes. Ranks stand in ascending order, and "
        "every process that makes the module is among them.",
        "",
        'Make it so: `init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "model"))`.',
    ),
    Code(
        "MD0561",
        "a module called with what does not fit",
        "A module takes every input of its program, in order or by name. A plain tensor is what "
        "this device holds of the input; a DTensor is whole, on the DeviceMesh of the module. "
        "Shapes and dtypes are those of the program.",
        "",
        '`module.local("x", tensor)` is this device\'s part of a whole tensor.',
    ),
    Code(
        "MD0562",
        "a placement that DTensor does not have",
        "A dim that is split over several axes is split in the order of the layout's rule, outer "
        "first. A DTensor splits in the order of the dims of its DeviceMesh, and no other.",
        "",
        "Write the axes in the rule in the order of the DeviceMesh. `module.whole_state_dict()` "
        "yields whole tensors whatever the order.",
    ),
    Code(
        "MD0563",
        "values that are not those of the parameters",
        "`load_state_dict`, and the argument `params`, take whole tensors or DTensors, of the "
        "shapes that the program's parameters have. What a device holds of one is not enough.",
        "",
        "Give the state dict of a module, under any layout, or whole tensors.",
    ),
    Code(
        "MD0564",
        "a module under an `sbp` block",
        "An `sbp` block places tensors one by one, and gradients are not among them; a module "
        "needs to know how those of parameters and inputs are held.",
        "",
        "Choose a layout, whose rules bind gradients as they bind what they are gradients of.",
    ),
    Code(
        "MD0565",
        "a second derivative of a module",
        "`create_graph=True` asks autograd to differentiate a backward pass again. That of a "
        "module is compiled, and has no derivative of its own.",
        "",
        "Leave `create_graph` out, or return the gradient from the program: `dx = grad(loss, x)`.",
    ),
)
