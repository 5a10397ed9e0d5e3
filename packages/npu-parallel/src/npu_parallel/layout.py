"""Which parallel degrees are legal together, for a number of ranks and a model; in plain Python, without torch.

The rules are those of torchtitan 0.3.0 and of the parts of torch 2.14 it calls:

* dp_replicate * dp_shard * cp * tp * pp is the number of ranks (``ParallelDims``);
* expert parallelism (ep) borrows the ranks of dp_shard * cp * tp, so it divides that (``ParallelDims.build_mesh``);
* tp divides the heads and the key/value heads (``Decoder.Config``); vocabulary and feed-forward sizes may be uneven;
* ep divides the experts;
* the sequence length is a multiple of tp with sequence parallelism, of 2 * cp (``Trainer``), and of cp * 128 with
  FlexAttention block masks (torch's context parallelism);
* pipeline stages share out the layers (``pipeline_parallel``), and some schedules limit the microbatches (torch's
  ``pipelining/schedules.py``).
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

# torch cuts FlexAttention's block masks for context parallelism in blocks of this many tokens, whatever the block size
# of the attention is.
FLEX_BLOCK_SIZE = 128

# Schedule: stages of a rank (torchtitan's default), and torch's rule for the number of microbatches.
#   stages: at least one for each stage.
#   rounds: a multiple of the rounds, of which there is one for each full pp microbatches.
SCHEDULES: dict[str, tuple[int, Literal["any", "stages", "rounds"]]] = {
    "1F1B": (1, "stages"),
    "GPipe": (1, "any"),
    "LoopedBFS": (2, "any"),
    "Interleaved1F1B": (2, "rounds"),
    "InterleavedZeroBubble": (2, "rounds"),
    "ZBVZeroBubble": (2, "any"),
    "DualPipeV": (2, "stages"),
}

_MESH_DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
_SHOWN = 6
# Keeps the search for legal alternatives short.
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The parallel degrees; the defaults are torchtitan's.

    Attributes:
        dp_replicate: Replicas of the parameters (DDP, or the outer degree of HSDP).
        dp_shard: Data-parallel ranks a parameter is sharded over (FSDP); -1 is all ranks the others leave.
        cp: Context parallelism: parts of the sequence.
        tp: Tensor parallelism.
        pp: Pipeline parallelism, in ranks.
        ep: Expert parallelism; it takes no ranks of its own but borrows those of dp_shard, cp and tp.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        degrees = {name: getattr(self, name) for name in (*_MESH_DEGREES, "ep")}
        return " ".join(f"{name}={n}" for name, n in degrees.items() if n != 1) or "one rank"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that limit how it can be split.

    Attributes:
        n_layers: Transformer layers.
        n_heads: Query heads.
        n_kv_heads: Key/value heads; None is n_heads (also right for multi-head latent attention).
        n_experts: Routed experts of a mixture-of-experts layer; 0 is a dense model.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int | None = None
    n_experts: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a layout is not legal.

    Attributes:
        what: What is wrong, with the numbers.
        where: The field at fault: a degree of ``Layout``, ``world_size``, ``seq_len``, ``local_batch_size`` or
            ``global_batch_size``.
        fix: The legal alternatives.
    """

    what: str
    where: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}. {self.fix}."


def resolve(layout: Layout, world_size: int) -> Layout:
    """The layout with ``dp_shard=-1`` replaced by the ranks the other degrees leave.

    Args:
        layout: Degrees, checked or not.
        world_size: Number of ranks.

    Returns:
        The layout itself when dp_shard is given.

    Raises:
        ValueError: The degrees do not multiply to ``world_size``; the text lists the legal alternatives. Or a number is
            not a whole one in its range.
    """
    _check_arguments(world_size, layout=layout)
    problems = _degree_problems(layout, world_size) or _product_problems(
        layout, world_size, moe=layout.ep > 1, is_legal=lambda candidate: not check(candidate, world_size)
    )
    if problems:
        raise ValueError("\n".join(map(str, problems)))
    return _fill(layout, world_size)


def check(
    layout: Layout,
    world_size: int,
    shape: ModelShape | None = None,
    *,
    seq_len: int | None = None,
    local_batch_size: int | None = None,
    global_batch_size: int | None = None,
    microbatch_size: int = 1,
    schedule: str = "1F1B",
    first_stage_less_layers: int = 1,
    last_stage_less_layers: int = 1,
    sequence_parallel: bool = True,
    flex_attention: bool = True,
) -> list[Problem]:
    """Every reason why a layout is not legal, each with the legal alternatives.

    What is not given is not checked. Where the degrees do not multiply to ``world_size``, the rules that need only the
    other degrees are still checked.

    Args:
        layout: Degrees.
        world_size: Number of ranks.
        shape: The model's sizes.
        seq_len: Tokens of a training sequence.
        local_batch_size: Sequences of a data-parallel rank in one forward and backward.
        global_batch_size: Sequences of an optimizer step over all ranks.
        microbatch_size: Sequences of a pipeline microbatch.
        schedule: Pipeline schedule, a key of ``SCHEDULES`` in any case.
        first_stage_less_layers: Layers the token embedding counts for when layers are shared out over the stages.
        last_stage_less_layers: The same for the final norm and the output projection.
        sequence_parallel: Whether tp also splits the sequence outside attention.
        flex_attention: Whether attention takes FlexAttention block masks (torchtitan's language models do).

    Returns:
        The problems; empty when the layout is legal.

    Raises:
        ValueError: ``world_size`` or a size of the model or of the batch is below 1 or above 2**31 - 1, a count of
            layers or experts is below 0, a number is not a whole one, or the schedule is unknown.
    """
    _check_arguments(
        world_size,
        shape,
        layout=layout,
        seq_len=seq_len,
        local_batch_size=local_batch_size,
        global_batch_size=global_batch_size,
        microbatch_size=microbatch_size,
        first_stage_less_layers=first_stage_less_layers,
        last_stage_less_layers=last_stage_less_layers,
    )
    schedule = _schedule_name(schedule)

    def is_legal(candidate: Layout) -> bool:
        return not check(
            candidate,
            world_size,
            shape,
            seq_len=seq_len,
            local_batch_size=local_batch_size,
            global_batch_size=global_batch_size,
            microbatch_size=microbatch_size,
            schedule=schedule,
            first_stage_less_layers=first_stage_less_layers,
            last_stage_less_layers=last_stage_less_layers,
            sequence_parallel=sequence_parallel,
            flex_attention=flex_attention,
        )

    problems = _degree_problems(layout, world_size)
    # The other rules are checked as if a degree below 1 were 1.
    layout = replace(layout, **{problem.where: 1 for problem in problems})
    if not problems:
        moe = layout.ep > 1 or (shape is not None and shape.n_experts > 0)
        problems = _product_problems(layout, world_size, moe, is_legal)
    fits = not problems
    layout = _fill(layout, world_size)
    problems += _expert_problems(layout, shape, fits)
    if shape is not None:
        problems += _tensor_problems(layout, shape)
        problems += _stage_problems(layout, shape, schedule, first_stage_less_layers, last_stage_less_layers)
    if seq_len is not None:
        problems += _sequence_problems(layout, seq_len, sequence_parallel, flex_attention)
    if local_batch_size is not None:
        problems += _batch_problems(layout, local_batch_size, microbatch_size, schedule)
        if global_batch_size is not None and fits:
            problems += _global_batch_problems(layout, local_batch_size, global_batch_size)
    return problems


def legal_layouts(
    world_size: int, shape: ModelShape | None = None, seq_len: int | None = None, moe: bool = False
) -> list[Layout]:
    """All legal layouts of a number of ranks, under the defaults of ``check``.

    Args:
        world_size: Number of ranks.
        shape: The model's sizes; a shape with experts implies ``moe``.
        seq_len: Tokens of a training sequence.
        moe: Also vary ep; without experts it stays 1.

    Returns:
        Layouts in ascending order of (pp, tp, cp, ep, dp_replicate): those with least communication inside the model
        and most FSDP come first.

    Raises:
        ValueError: As ``check``.
    """
    _check_arguments(world_size, shape, seq_len=seq_len)
    moe = moe or (shape is not None and shape.n_experts > 0)
    return [layout for layout in _meshes(world_size, moe) if not check(layout, world_size, shape, seq_len=seq_len)]


def seq_len_divisor(layout: Layout, *, sequence_parallel: bool = True, flex_attention: bool = True) -> int:
    """The number a sequence length must be a multiple of.

    Args:
        layout: Degrees; only cp and tp matter.
        sequence_parallel: Whether tp also splits the sequence outside attention.
        flex_attention: Whether attention takes FlexAttention block masks.

    Returns:
        The least common multiple of the rules that apply, in tokens.
    """
    return math.lcm(*(divisor for divisor, _ in _sequence_rules(layout, sequence_parallel, flex_attention)))


# Rules. Each function returns the problems of one kind.


def _degree_problems(layout: Layout, world_size: int) -> list[Problem]:
    problems = []
    for name in (*_MESH_DEGREES, "ep"):
        degree = getattr(layout, name)
        if degree < 1 and not (name == "dp_shard" and degree == -1):
            also = ", or -1 for all ranks the others leave" if name == "dp_shard" else ""
            problems.append(
                Problem(f"the degree is {degree}", name, f"Use one of {_listed(_divisors(world_size))}{also}")
            )
    return problems


def _product_problems(layout: Layout, world_size: int, moe: bool, is_legal: Callable[[Layout], bool]) -> list[Problem]:
    fixed = {name: getattr(layout, name) for name in _MESH_DEGREES if getattr(layout, name) != -1}
    product = math.prod(fixed.values())
    if product == world_size or (layout.dp_shard == -1 and world_size % product == 0):
        return []
    terms = " * ".join(f"{name}({degree})" for name, degree in fixed.items())
    rule = "does not divide" if layout.dp_shard == -1 else "is not"

    single = []
    for name, degree in fixed.items():
        others = product // degree
        if world_size % others:
            continue
        values = _divisors(world_size // others) if layout.dp_shard == -1 else [world_size // others]
        values = [value for value in values if is_legal(_fill(replace(layout, **{name: value}), world_size))]
        if values:
            single.append(f"{name}={_listed(values, 'or')}")

    candidates = sorted(filter(is_legal, _meshes(world_size, moe)), key=lambda candidate: _distance(candidate, layout))
    fixes = []
    if single:
        fixes.append("Change one degree: " + ", or ".join(single))
    if candidates:
        more = len(candidates) - _SHOWN
        whole = "; ".join(map(str, candidates[:_SHOWN])) + (f"; and {more} more" if more > 0 else "")
        fixes.append(f"Nearest legal layouts of {world_size} ranks: {whole}")
    if not fixes:
        fixes.append(
            f"No layout of {world_size} ranks is legal with the model and sizes given: use another number of ranks"
        )
    return [Problem(f"{terms} = {product} {rule} the {world_size} ranks", "world_size", ". ".join(fixes))]


def _expert_problems(layout: Layout, shape: ModelShape | None, fits: bool) -> list[Problem]:
    if layout.ep == 1:
        return []
    if shape is not None and shape.n_experts == 0:
        return [Problem(f"the degree is {layout.ep}, but the model has no experts", "ep", "Use ep=1")]
    n_experts = shape.n_experts if shape is not None else 0
    # Without a layout that fits the ranks it is not known how many ranks there are to borrow: 0 is divided by all.
    ranks = layout.dp_shard * layout.cp * layout.tp if fits else 0
    legal = _divisors(math.gcd(n_experts, ranks) or layout.ep)
    problems = []
    if n_experts % layout.ep:
        what = f"ep({layout.ep}) does not divide the {n_experts} experts"
        problems.append(Problem(what, "ep", f"Use ep={_listed(legal, 'or')}"))
    if ranks % layout.ep:
        mesh = f"dp_shard({layout.dp_shard}) * cp({layout.cp}) * tp({layout.tp}) = {ranks}"
        what = f"ep({layout.ep}) does not divide {mesh}"
        fix = f"Use ep={_listed(legal, 'or')}"
        if layout.dp_replicate > 1:
            what += ", and dp_replicate lends it no ranks"
            if n_experts % layout.ep == 0 and layout.dp_replicate * ranks % layout.ep == 0:
                fix += (
                    f", or shards instead of replicas: dp_replicate=1 dp_shard={layout.dp_replicate * layout.dp_shard}"
                )
        problems.append(Problem(what, "ep", fix))
    return problems


def _tensor_problems(layout: Layout, shape: ModelShape) -> list[Problem]:
    heads = {"n_heads": shape.n_heads, "n_kv_heads": shape.n_kv_heads or shape.n_heads}
    legal = _divisors(math.gcd(*heads.values()))
    return [
        Problem(f"tp({layout.tp}) does not divide {name} ({number})", "tp", f"Use tp={_listed(legal, 'or')}")
        for name, number in heads.items()
        if number % layout.tp and not (name == "n_kv_heads" and shape.n_kv_heads is None)
    ]


def _stage_problems(layout: Layout, shape: ModelShape, schedule: str, first: int, last: int) -> list[Problem]:
    stages_per_rank, _ = SCHEDULES[schedule]

    def fits(pp: int) -> bool:
        stages = pp * stages_per_rank
        layers = (shape.n_layers + first + last) // stages
        return stages == 1 or (layers >= 1 and layers >= first and layers >= last)

    if layout.pp == 1 or fits(layout.pp):
        return []
    largest = max(pp for pp in range(1, layout.pp) if pp == 1 or fits(pp))
    what = (
        f"{shape.n_layers} layers (and {first} + {last} for the embedding and the output) are too few for "
        f"pp({layout.pp}) * {stages_per_rank} stages a rank ({schedule})"
    )
    return [Problem(what, "pp", f"Use pp={largest} or less")]


def _sequence_rules(layout: Layout, sequence_parallel: bool, flex_attention: bool) -> list[tuple[int, str]]:
    rules = [(1, "")]
    tp = layout.tp if sequence_parallel else 1
    if tp > 1 or layout.cp > 1:
        terms = ([f"tp({tp})"] if tp > 1 else []) + ([f"2 * cp({layout.cp})"] if layout.cp > 1 else [])
        rules.append((tp * (2 * layout.cp if layout.cp > 1 else 1), " * ".join(terms)))
    if layout.cp > 1 and flex_attention:
        rules.append((layout.cp * FLEX_BLOCK_SIZE, f"cp({layout.cp}) * {FLEX_BLOCK_SIZE} (FlexAttention block masks)"))
    return rules


def _sequence_problems(layout: Layout, seq_len: int, sequence_parallel: bool, flex_attention: bool) -> list[Problem]:
    rules = _sequence_rules(layout, sequence_parallel, flex_attention)
    broken = [f"{term} = {divisor}" for divisor, term in rules if seq_len % divisor]
    if not broken:
        return []
    step = math.lcm(*(divisor for divisor, _ in rules))
    below = seq_len // step * step
    nearest = [below, below + step] if below else [step]
    fix = f"Nearest legal lengths (multiples of {step}): {_listed(nearest)}"
    return [Problem(f"{seq_len} is not a multiple of {', nor of '.join(broken)}", "seq_len", fix)]


def _batch_problems(layout: Layout, local_batch_size: int, microbatch_size: int, schedule: str) -> list[Problem]:
    if layout.pp == 1:
        return []
    stages_per_rank, rule = SCHEDULES[schedule]

    def legal(size: int, microbatch: int) -> bool:
        count, rest = divmod(size, microbatch)
        if rest:
            return False
        if rule == "stages":
            return count >= layout.pp * stages_per_rank
        return rule == "any" or count % max(1, count // layout.pp) == 0

    if legal(local_batch_size, microbatch_size):
        return []
    microbatches, rest = divmod(local_batch_size, microbatch_size)
    if rest:
        what = f"{local_batch_size} is not a multiple of the microbatch size ({microbatch_size})"
    elif rule == "stages":
        stages = layout.pp * stages_per_rank
        what = f"{microbatches} microbatches are fewer than the {stages} pipeline stages of {schedule}"
    else:
        rounds = microbatches // layout.pp
        what = f"{microbatches} microbatches do not split into the {rounds} equal rounds of {schedule}"
    # One microbatch for each stage is legal under every rule, and so is each multiple of it: neither search is long.
    fewer = range((local_batch_size - 1) // microbatch_size, 0, -1)
    below = next((size for n in fewer if legal(size := n * microbatch_size, microbatch_size)), None)
    more = itertools.count(microbatches + 1)
    above = next(size for n in more if legal(size := n * microbatch_size, microbatch_size))
    fix = f"Use {_listed([above] if below is None else [below, above], 'or')}"
    microbatch_sizes = [size for size in _divisors(local_batch_size) if legal(local_batch_size, size)]
    if microbatch_sizes:
        fix += f", or a microbatch size of {_listed(microbatch_sizes, 'or')}"
    return [Problem(what, "local_batch_size", fix)]


def _global_batch_problems(layout: Layout, local_batch_size: int, global_batch_size: int) -> list[Problem]:
    replicas = layout.dp_replicate * layout.dp_shard
    step = local_batch_size * replicas
    if global_batch_size % step == 0:
        return []
    below = global_batch_size // step * step
    nearest = [below, below + step] if below else [step]
    what = (
        f"{global_batch_size} is not a multiple of the local batch size ({local_batch_size}) times "
        f"dp_replicate * dp_shard ({replicas}) = {step}"
    )
    return [Problem(what, "global_batch_size", f"Nearest legal sizes: {_listed(nearest)}")]


# Helpers.


def _check_arguments(
    world_size: int, shape: ModelShape | None = None, layout: Layout | None = None, **numbers: int | None
) -> None:
    # Name: the number, and the least that it may be. The least degree has a rule of its own, with alternatives.
    checked = {"world_size": (world_size, 1)}
    if layout is not None:
        checked |= {name: (getattr(layout, name), -_LARGEST) for name in (*_MESH_DEGREES, "ep")}
    if shape is not None:
        checked |= {"n_layers": (shape.n_layers, 1), "n_heads": (shape.n_heads, 1), "n_experts": (shape.n_experts, 0)}
        numbers["n_kv_heads"] = shape.n_kv_heads
    for name, number in numbers.items():
        if number is not None or name.endswith("less_layers") or name == "microbatch_size":
            checked[name] = (number, 0 if name.endswith("less_layers") else 1)
    for name, (number, least) in checked.items():
        if not isinstance(number, int):
            raise ValueError(f"{name} is {number!r}; it must be a whole number.")
        if number < least:
            raise ValueError(f"{name} is {number}; it must be {least} or more.")
        if number > _LARGEST:
            raise ValueError(f"{name} is {number}; it must be at most {_LARGEST}.")


def _schedule_name(schedule: str) -> str:
    for name in SCHEDULES:
        if isinstance(schedule, str) and name.lower() == schedule.lower():
            return name
    raise ValueError(f"schedule is {schedule!r}; use one of {', '.join(SCHEDULES)}.")


def _fill(layout: Layout, world_size: int) -> Layout:
    if layout.dp_shard != -1:
        return layout
    others = math.prod(getattr(layout, name) for name in _MESH_DEGREES if name != "dp_shard")
    return replace(layout, dp_shard=max(1, world_size // others))


def _meshes(world_size: int, moe: bool) -> Iterator[Layout]:
    for pp in _divisors(world_size):
        for tp in _divisors(world_size // pp):
            for cp in _divisors(world_size // (pp * tp)):
                data = world_size // (pp * tp * cp)
                for ep in _divisors(data * cp * tp) if moe else [1]:
                    for dp_replicate in _divisors(data):
                        yield Layout(dp_replicate, data // dp_replicate, cp, tp, pp, ep)


def _distance(candidate: Layout, layout: Layout) -> float:
    """How far apart two layouts are: the factors by which their degrees differ, in octaves."""
    degrees = (name for name in (*_MESH_DEGREES, "ep") if getattr(layout, name) != -1)
    return sum(abs(math.log2(getattr(candidate, name) / getattr(layout, name))) for name in degrees)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _listed(numbers: list[int], last: str = "and") -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {last} {texts[-1]}"
