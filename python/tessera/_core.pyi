"""The C interface for Python: outputs are the caller's arrays. `tessera.attention` explains shapes and options."""

from typing import Any

from typing_extensions import Unpack

from tessera._options import BackwardOptions, Options

version: str

class Error(ValueError):
    """A wrong argument, in one line: its name, what was given, what is accepted."""

def forward(q: Any, k: Any, v: Any, o: Any, lse: Any = None, **options: Unpack[Options]) -> None:
    """Writes o, and lse where it is given."""

def forward_by_heads(q: Any, k: Any, v: Any, o: Any, lse: Any = None, **options: Unpack[Options]) -> None:
    """forward of q, k, v [B, H, S, D]; o is [B, Sq, Hq, Dv]."""

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
    """Writes d_q, d_k, d_v, and d_bias and d_sink where they are given."""

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
    """backward of q, k, v and their gradients [B, H, S, D]; o and d_o are [B, Sq, Hq, Dv]."""

def plan(
    direction: str, q: Any, k: Any, v: Any, o: Any = None, lse: Any = None, **options: Unpack[BackwardOptions]
) -> str:
    """The plan in words. Outputs that are not given are planned as contiguous."""

def plan_json(
    direction: str, q: Any, k: Any, v: Any, o: Any = None, lse: Any = None, **options: Unpack[BackwardOptions]
) -> str:
    """The plan as JSON."""

def check(
    direction: str, q: Any, k: Any, v: Any, o: Any = None, lse: Any = None, **options: Unpack[BackwardOptions]
) -> None:
    """Error where the call would be refused for what is known before data is read."""

def combine(
    o_parts: Any, lse_parts: Any, o: Any, lse: Any = None, lse_low_parts: Any = None, lse_low: Any = None
) -> None:
    """Writes o, and lse where it is given."""

def append(
    k: Any, v: Any, k_cache: Any, v_cache: Any, seqused_k: Any, *, cu_seqlens: Any = None, page_table: Any = None,
    q: Any = None, q_out: Any = None, cos: Any = None, sin: Any = None, positions_q: Any = None,
    positions_k: Any = None, dropped: Any = None, interleaved: bool = False,
) -> None:
    """Writes k_cache, v_cache, and q_out, or q where q_out is not given."""

def kernel_names() -> list[str]:
    """What `kernel` may name, "auto" first."""

def option_fields() -> list[dict[str, Any]]:
    """The options by name, with their annotation, default and kind: "tensor", "backward tensor", "value" or "execution"."""

def device(name: str = "cpu") -> dict[str, Any]:
    """This machine's CPU: name, isa, isa_limit, cores, threads, l1_bytes, l2_bytes. TESSERA_ISA and
    TESSERA_NUM_THREADS count as they stood at the first call.

    "cuda" or "cuda:<number>": that GPU: name, ordinal, arch (10 * major + minor), cores (multiprocessors), l2_bytes,
    smem_bytes. Error where Tessera cannot compute on it: the message says why."""

def busy_text(threads: int) -> str:
    """A sentence where other work leaves fewer than so many processors idle, else nothing. Takes a fifth of a second."""

class ComparisonTable:
    """The table of a comparison: sides of (title, name, whether what ran has a column), Tessera first."""

    def __init__(self, sides: list[tuple[str, str, bool]], teraflops: bool, width: int | None) -> None: ...
    def header(self) -> str: ...
    def row(self, direction: str, length: int, sides: list[dict[str, Any]]) -> str:
        """Of each side seconds, gflops, extra_bytes, max_error and rms_error, None where it has none, needs_bytes and kernel."""
    def legend(self, queries_alone: bool, notes: str) -> str:
        """What stands below the table."""
