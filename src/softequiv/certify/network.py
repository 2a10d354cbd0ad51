"""How far can a whole network be from equivariant, for every input? Where the Lipschitz constants of all operations are
known, the weights' certificates compose into a bound for the network; elsewhere it is said that there is none.

For each tensor h of the network's graph two bounds are carried, affine in the size of the input x:
||h(x)|| and ||h(rho x) - rho h(x)||. A layer multiplies the second by its norm and adds its own defect times the first.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export.graph_signature import OutputKind, TensorArgument

from softequiv._text import aligned
from softequiv.adapt.bake import bake
from softequiv.adapt.checkpoint import action_of
from softequiv.asking.data import check_samples
from softequiv.certify.call import Call
from softequiv.certify.certificate import Certificate, certify_weights, span
from softequiv.certify.rules import NO_CONSTANT, RULES
from softequiv.certify.signals import Affine, How, Moving, Range, Signal, UnboundedError
from softequiv.errors import SoftEquivError
from softequiv.groups import Group
from softequiv.groups.angles import range_of
from softequiv.groups.parse import as_group
from softequiv.nn import soft_weights
from softequiv.reps import Action, Hom, Rep

SHOWN = 8  # layers named in the table, the largest parts first


@dataclass(frozen=True)
class NetworkCertificate:
    """||F(g x) - g F(x)|| <= slope ||x|| + offset for every input x and every g in the range, where `bounded`.

    `parts` splits the bound over the layers whose defect causes it; `size` bounds ||F(x)||.
    Where no bound can be given `reason` says why, and `layers`, the certificate of the single weights, is what remains.
    Exact arithmetic with these weights: rounding in the input's dtype adds nothing here, see the weights' own
    `rounding`; a network that rounds to a coarser one has no bound.
    """

    group: Group
    within: float
    bounded: bool
    reason: str
    slope: float | None
    offset: float | None
    size: Affine | None
    output: str
    parts: Mapping[str, Affine]
    layers: Certificate | None

    @property
    def idle(self) -> bool:
        """Whether the bound is that of any network, 2 ||F(x)||, as in deep networks, whose constants multiply."""
        if self.slope is None or self.offset is None or self.size is None:
            return False
        return self.slope >= 2 * self.size.slope * (1 - 1e-9) and self.offset >= 2 * self.size.offset * (1 - 1e-9)

    def bound(self, x: Tensor) -> Tensor:
        """The certified change for each sample of a batch, (samples,)."""
        if self.slope is None or self.offset is None:
            raise SoftEquivError(f"this network has no certificate: {self.reason}")
        check_samples(x)
        return self.slope * x.flatten(1).norm(dim=1) + self.offset

    def __str__(self) -> str:
        head = f"{self.group}, {span(self.within)}: network certificate"
        if not self.bounded:
            layers = [str(self.layers)] if self.layers is not None else []
            return "\n".join([f"{head}: none", f"no bound was computed: {self.reason}", *layers])
        bound = f"{self.slope:.4g} ||x|| + {self.offset:.4g}"
        rows: list[tuple[str, ...]] = [("layer", "part of the slope", "part of the offset")]
        ranked = sorted(self.parts.items(), key=lambda item: -(item[1].slope + item[1].offset))
        rows += [(name, f"{part.slope:.3g}", f"{part.offset:.3g}") for name, part in ranked[:SHOWN]]
        return "\n".join(
            [
                head,
                f"||F(g x) - g F(x)|| <= {bound} for every x; the output {self.output}",
                f"(||F(x)|| <= {self.size}; exact arithmetic with these weights, modelled action on the input)",
                *(
                    ["no more than 2 ||F(x)||, which holds for any network: true, and says nothing"]
                    if self.idle
                    else []
                ),
                *aligned(rows),
                *([f"and smaller parts of other layers: {len(ranked) - SHOWN}"] if len(ranked) > SHOWN else []),
            ]
        )


def certify_network(
    model: nn.Module,
    group: Group | str,
    within: float | str,
    example: Tensor,
    *,
    source: Rep | None = None,
    grids: Mapping[str, tuple[int, ...]] | None = None,
    action: Action = "exact",
) -> NetworkCertificate:
    """A rigorous bound on ||F(g x) - g F(x)|| for a network in evaluation mode, for inputs of the shape of `example`.

    Pictures (N, C, H, W) and signals (N, C, L) move by the group's action on their grid, vectors (N, D) as `source`
    says, or as the first soft layer that takes them. `action` and `grids` are those of `soften`, for a plain model. The
    bound is for the first tensor that the model returns. Covered are linear layers, convolutions, batch norm, pooling,
    functions of single entries, sums and joins. Attention and layer norm have no Lipschitz constant; with them only the
    certificates of the single weights are given.

    >>> import softequiv as se
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> net = se.soften(net, "SO(2)", softness=0.0, grids={"1": (1, 8, 8)})
    >>> certify_network(net, "SO(2)", se.degrees(30), torch.zeros(1, 1, 8, 8)).slope < 1e-5
    True
    """
    chosen, reach = as_group(group), cast(float, range_of(within))
    if not isinstance(example, Tensor) or example.ndim < 2 or not example.is_floating_point():
        raise SoftEquivError("example must be one floating-point tensor, (N, C, H, W), (N, C, L) or (N, D)")
    reps = {weight.name: weight.soft.rep for weight in soft_weights(model) if weight.soft.rep.group == chosen}
    elements = Range.of(chosen, reach, action_of(next(iter(reps.values()))) if reps else action)
    plain = bake(model, copy=True).eval().cpu()
    reason, result = "", None
    try:
        result = finite(interpreted(plain, elements, example.cpu(), source, under_every_name(reps, plain)))
    except (UnboundedError, SoftEquivError) as problem:  # the latter where the group does not act on such pictures
        reason = str(problem)
    except torch.linalg.LinAlgError as problem:  # type: ignore[attr-defined]  # torch's stubs leave it out
        reason = f"the action of {chosen} cannot be undone on some space here, so it is no group's: {problem}"
    layers = None
    if result is None:
        with contextlib.suppress(SoftEquivError):  # no weight lives on a representation: nothing remains to be said
            layers = certify_weights(model, reach, chosen, grids=grids, action=action)
    total = None if result is None else result.total
    return NetworkCertificate(
        group=chosen,
        within=reach,
        bounded=result is not None,
        reason=reason,
        slope=None if total is None else total.slope,
        offset=None if total is None else total.offset,
        size=None if result is None else result.size,
        output="" if result is None else str(result.how),
        parts={} if result is None else result.change,
        layers=layers,
    )


def under_every_name(reps: Mapping[str, Rep], plain: nn.Module) -> dict[str, Rep]:
    """The spaces of weights, also under the other names of modules that a model holds more than once."""
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    same = {id(parameters[name]): rep for name, rep in reps.items()}
    return {name: same[id(value)] for name, value in parameters.items() if id(value) in same}


def finite(result: Signal) -> Signal:
    """A bound that float64 can hold."""
    total = result.total
    if not all(map(math.isfinite, (total.slope, total.offset, result.size.slope, result.size.offset))):
        raise UnboundedError("the weights are not finite, or the bound is too large for float64")
    return result


@dataclass(frozen=True)
class Given:
    """What the graph of a model is followed with; `names` are those of parameters by the names of their nodes."""

    program: Any
    names: Mapping[str, str]
    elements: Range
    example: Tensor
    source: Rep | None
    spaces: Mapping[str, Rep]

    def space(self, node: Any) -> Rep | None:
        """The space of the weight that a node holds."""
        return self.spaces.get(self.names.get(getattr(node, "name", ""), ""))


@torch.no_grad()
def interpreted(
    model: nn.Module, elements: Range, example: Tensor, source: Rep | None, spaces: Mapping[str, Rep]
) -> Signal:
    """Follow the bounds through the model's graph to its first output."""
    try:
        program = torch.export.export(model, (example,))
        if any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in program.graph.nodes):
            program = program.run_decompositions({})  # writes in place become operations with results of their own
    except Exception as problem:  # any model may come, and torch.export fails in many ways
        raise UnboundedError(f"torch.export cannot trace the model: {type(problem).__name__}: {problem}") from None
    signature, graph = program.graph_signature, program.graph_module.graph
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    given = Given(program, names, elements, example, source, spaces)
    refuse_without_constant(graph)
    refuse_memory(signature)
    known: dict[Any, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = placeholder(node, given)
            entry = node  # the input comes last
        elif node.op == "get_attr":
            raise UnboundedError(f"{node.name}: parts under autocast, no_grad or a condition of their own have no rule")
        elif node.op == "call_function":
            result = evaluated(node, known, given)
            orthogonal = isinstance(result, Signal) and result.keeps_lengths and known[entry].keeps_lengths
            known[node] = result.capped() if orthogonal else result
    answer = known.get(first_output(program))
    if not isinstance(answer, Signal):
        raise UnboundedError("the first tensor that the model returns does not depend on its input")
    return Call("output", {"self": answer}, type(model).__name__, answer.shape, elements, {}).x


def refuse_memory(signature: Any) -> None:
    """What a model keeps from one call to the next changes its answers; writing over its input does not."""
    for spec in signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION):
            raise UnboundedError(f"the model writes into {spec.target or spec.arg.name} when it is called")


def first_output(program: Any) -> Any:
    """The node of the first tensor that the model returns."""
    specs = program.graph_signature.output_specs
    returned = [s.arg for s in specs if s.kind == OutputKind.USER_OUTPUT and isinstance(s.arg, TensorArgument)]
    if not returned:
        raise UnboundedError("the model returns no tensor")
    return next(node for node in program.graph_module.graph.nodes if node.name == returned[0].name)


def flat(values: Any) -> list[Any]:
    """Nested sequences as one list."""
    return [leaf for value in values for leaf in flat(value)] if isinstance(values, (tuple, list)) else [values]


def place(node: Any) -> str:
    """The module in which a node was made."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0] or node.name) if stack else str(node.name)


def op_name(node: Any) -> str:
    """The operation without its namespace and form: conv2d, add."""
    schema = getattr(node.target, "_schema", None)
    name = schema.name.split("::")[-1] if schema is not None else getattr(node.target, "__name__", str(node.target))
    return name if name.startswith("_") else name.rstrip("_")


def refuse_without_constant(graph: Any) -> None:
    """The first operation that has no global constant, whatever stands before it."""
    for node in graph.nodes:
        if node.op == "call_function" and op_name(node) in NO_CONSTANT:
            raise UnboundedError(f"{op_name(node)} in {place(node)}: {NO_CONSTANT[op_name(node)]}")


def placeholder(node: Any, given: Given) -> Any:
    """A parameter's value, or the input as a signal."""
    program, signature = given.program, given.program.graph_signature
    if node.name in given.names:
        name = given.names[node.name]
        value = program.state_dict.get(name)
        return program.constants[name] if value is None else value
    if node.name in signature.inputs_to_lifted_tensor_constants:
        return program.constants[signature.inputs_to_lifted_tensor_constants[node.name]]
    return Signal(tuple(given.example.shape), input_action(node, given), Affine(1.0, 0.0), {})


def input_action(node: Any, given: Given) -> How:
    """How the group moves the input."""
    source, elements, shape = given.source, given.elements, tuple(given.example.shape)
    if source is not None:
        if source.group != elements.group or source.dim != shape[-1] or len(shape) != 2:
            raise UnboundedError(f"source {source} of {source.group} does not fit vectors of shape {shape}")
        return Moving(source)
    if len(shape) > 2:
        return elements.picture(shape[1], shape[2:])
    for user in node.users:
        weight = user.args[1] if op_name(user) == "linear" else None
        space = given.space(weight)
        if isinstance(space, Hom):
            return Moving(space.source)
        if space is not None and shape[1] % space.dim == 0:
            return Moving(space, shape[1] // space.dim)
    raise UnboundedError("how the group moves the input vectors is not known: give source=, a representation")


def coarser(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether numbers of a floating type lie further apart, or end earlier, than those of another."""
    one, other = torch.finfo(dtype), torch.finfo(than)
    return one.eps > other.eps or one.max < other.max


def refuse_unsteady(node: Any, arguments: Mapping[str, Any]) -> None:
    """A constant must be the same in every call: not random (dropout may be off), not memory as it was found."""
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if (random and arguments.get("train", True)) or "empty" in op_name(node).split("_"):
        raise UnboundedError(f"{op_name(node)} in {place(node)} makes other numbers in every call")


def evaluated(node: Any, known: Mapping[Any, Any], given: Given) -> Any:
    """The result of one operation: a constant where all its arguments are, else a signal by its rule."""

    def value(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return type(argument)(value(part) for part in argument)
        return known[argument] if isinstance(argument, torch.fx.Node) else argument

    args, kwargs = [value(arg) for arg in node.args], {key: value(arg) for key, arg in node.kwargs.items()}
    schema = node.target._schema.arguments if hasattr(node.target, "_schema") else ()
    named = {**dict(zip((argument.name for argument in schema), args, strict=False)), **kwargs}
    if not any(isinstance(part, Signal) for part in flat([*args, *kwargs.values()])):
        refuse_unsteady(node, named)
        return node.target(*args, **kwargs)
    if node.target is operator.getitem:
        if args[1] != 0:  # of batch norm and pooling the first result is the tensor that goes on
            raise UnboundedError(f"result {args[1]} of {node.args[0]} has no rule")
        return args[0]
    op = op_name(node)
    if op.startswith("_assert"):
        return None
    if op not in RULES:
        raise UnboundedError(f"{op} in {place(node)} has no rule: its constant is not known")
    for argument in schema:
        if argument.has_default_value():
            named.setdefault(argument.name, argument.default_value)
    spaces = {argument.name: given.space(arg) for argument, arg in zip(schema, node.args, strict=False)}
    own = {name: space for name, space in spaces.items() if space is not None}
    meta = node.meta["val"]
    first = meta[0] if isinstance(meta, (tuple, list)) else meta
    if not first.is_floating_point():
        raise UnboundedError(f"{op} in {place(node)} makes {first.dtype} of activations, which jumps")
    dtype = given.example.dtype
    if coarser(first.dtype, dtype):
        raise UnboundedError(f"{op} in {place(node)} rounds activations to {first.dtype}, from {dtype} at the input")
    return RULES[op](Call(op, named, place(node), tuple(map(int, first.shape)), given.elements, own))
