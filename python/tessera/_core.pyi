"""The C interface for Python: the caller passes the outputs. `tessera.attention` documents shapes and options."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import Unpack

from tessera._options import BackwardOptions, Options

version: str

class Error(ValueError):
    """A wrong argument, in one line: its name, what was given, what is accepted."""

def forward(q: Any, k: Any, v: Any, o: Any, lse: Any = None, **options: Unpack[Options]) -> None:
    """Writes o, and lse if it is given."""

def forward_by_heads(q: Any, k: Any, v: Any, o: Any, lse: Any = None, **options: Unpack[Options]) -> None:
    """forward with q, k, v [B, H, S, D]; o is [B, Sq, Hq, Dv]."""

def backward(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    d_o: Any,
    d_q: Any,
    d_k: Any,
    d_v: Any,
    **options: Unpack[BackwardOptions],
) -> None:
    """Writes d_q, d_k, d_v, and d_bias and d_sink if they are given."""

def backward_by_heads(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    d_o: Any,
    d_q: Any,
    d_k: Any,
    d_v: Any,
    **options: Unpack[BackwardOptions],
) -> None:
    """backward with q, k, v and their gradients [B, H, S, D]; o and d_o are [B, Sq, Hq, Dv]."""

def plan(
    direction: str, q: Any, k: Any, v: Any, o: Any = None, lse: Any = None, **options: Unpack[BackwardOptions]
) -> str:
    """The plan as text. Outputs that are not given are planned as contiguous."""

def plan_json(
    direction: str, q: Any, k: Any, v: Any, o: Any = None, lse: Any = None, **options: Unpack[BackwardOptions]
) -> str:
    """The plan as JSON."""

class ScoreProgram:
    """A checked program, for the options program, captured, d_captured and scalars of forward, backward and plan.

    names: (name, "float", "int" or "bool", rank) of what the texts may use, -1 for a scalar. Captured arrays and
    scalars are given in this order. score, mask and gradient are canonical texts; inputs are those of a pair that the
    score or the mask depends on: "s", "b", "h", "h_kv", "i", "j", "q_pos", "len_q", "len_k"."""

    def __init__(self, score: str, mask: str, names: Sequence[tuple[str, str, int]]) -> None: ...
    @property
    def score(self) -> str: ...
    @property
    def mask(self) -> str: ...
    @property
    def gradient(self) -> str: ...
    @property
    def inputs(self) -> list[str]: ...
    @property
    def hash(self) -> int: ...

class ArrayWithoutData:
    """An array with a layout and no data. check, plan, combine and append accept it, and compute nothing.

    device_type: DLPack's, 0 for none; device_id -1: a GPU that this machine lacks."""

    def __init__(
        self, dtype: str, shape: Sequence[int], strides: Sequence[int], device_type: int, device_id: int = 0
    ) -> None: ...

def check(
    direction: str, q: Any, k: Any, v: Any, o: Any = None, lse: Any = None, d_o: Any = None,
    **options: Unpack[BackwardOptions],
) -> None:
    """Raises Error if the call would be refused by what is known before data are read."""

def combine(
    o_parts: Any, lse_parts: Any, o: Any, lse: Any = None, lse_low_parts: Any = None, lse_low: Any = None
) -> None:
    """Writes o, and lse if it is given."""

def append(
    k: Any, v: Any, k_cache: Any, v_cache: Any, seqused_k: Any, *, cu_seqlens: Any = None, page_table: Any = None,
    q: Any = None, q_out: Any = None, cos: Any = None, sin: Any = None, positions_q: Any = None,
    positions_k: Any = None, dropped: Any = None, k_descale: Any = None, v_descale: Any = None,
    interleaved: bool = False, compute_scales: bool = False,
) -> None:
    """Writes k_cache, v_cache, and q_out, or q if q_out is not given."""

def kernel_names() -> list[str]:
    """The names that `kernel` accepts, "auto" first."""

def option_fields() -> list[dict[str, Any]]:
    """The options by name, with their annotation, default and kind: "tensor", "backward tensor", "value" or
    "execution". A tensor also has its shapes, such as ["[Hq]", "[B, Hq]"], its dtypes and what it is, as text."""

def device(name: str = "cpu") -> dict[str, Any]:
    """This machine's CPU: name, isa, isa_limit, cores, threads, l1_bytes, l2_bytes. TESSERA_ISA and TESSERA_NUM_THREADS
    are read at the first call.

    "cuda" or "cuda:<number>": that GPU: name, ordinal, arch (10 * major + minor), cores (multiprocessors), l2_bytes,
    smem_bytes. Error if Tessera cannot compute on it; the message says why."""

def jax_handlers() -> dict[str, Any]:
    """Capsules of the functions that XLA calls, by the name of the target and the platform."""

def check_layouts(
    backward: bool, tensors: Sequence[tuple[str, str, tuple[int, ...]]], **options: Unpack[Options]
) -> None:
    """Raises Error if a problem of these tensors (name, dtype, shape) and options would be refused on any device."""

def workspace_on_gpus(
    backward: bool, tensors: Sequence[tuple[str, str, tuple[int, ...]]], **options: Unpack[Options]
) -> int:
    """The most bytes of workspace that such a problem needs on a GPU of any architecture. Opens no driver."""

def busy_text(threads: int) -> str:
    """A sentence if other processes leave fewer than this number of processors idle, otherwise "". Takes a fifth of a
    second."""
def info(as_json: bool) -> str:
    """The program's `info` about this machine, as text or JSON."""

def support(form: str) -> str:
    """The program's `support` of each back end: as "text", "markdown" or "json"."""

def plan_of_sizes(
    sizes: list[int], dtype: str, backward: bool, tensors: list[str], arch: int | None, ordinal: int | None,
    as_json: bool, **options: Unpack[Options],
) -> str:
    """The plan for contiguous tensors of sizes [B, Sq, Sk, Hq, Hkv, D, Dv], for the GPU with a number, for an
    architecture without a GPU, or for the CPU."""

def ranks_plan(lengths: list[int], rank: int, **members: Any) -> str:
    """A plan for many ranks as text (rank -1), or a rank's schedule. `members` are members of tessera_ranks_problem, by
    name."""

def ranks_plan_json(lengths: list[int], rank: int, **members: Any) -> str:
    """The same as JSON: the plan and, with a rank, its schedule."""

class ComparisonTable:
    """The table of a comparison. sides: (title, name, whether it has a column for its kernel), Tessera first."""

    def __init__(self, sides: list[tuple[str, str, bool]], teraflops: bool, width: int | None) -> None: ...
    def header(self) -> str: ...
    def row(self, direction: str, length: int, sides: list[dict[str, Any]]) -> str:
        """For each side seconds, gflops, extra_bytes, max_error and rms_error, None if unknown, needs_bytes and
        kernel."""
    def legend(self, queries_alone: bool, notes: str) -> str:
        """The text below the table."""
