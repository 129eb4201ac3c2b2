"""What tessera.serving's plug-ins see of vLLM 0.33 and SGLang 0.5.23, for tests where the packages are not installed.

Each stand-in has the packages' names, signatures and defaults that the plug-ins stand on, and no more.
scripts/check_engines.py holds them against the packages.
"""

import enum
import sys
import types
from abc import ABC, abstractmethod
from importlib.util import find_spec


def is_stand_in(name):
    return getattr(sys.modules.get(name), "is_stand_in", False)


def provide(name):
    """The package, or where it is not installed its stand-in in sys.modules."""
    if name not in sys.modules and find_spec(name) is None:
        for path, content in {"vllm": _vllm, "sglang": _sglang}[name]().items():
            module = types.ModuleType(path)
            module.__path__ = []
            module.is_stand_in = True
            vars(module).update(content)
            sys.modules[path] = module
            parent, _, leaf = path.rpartition(".")
            if parent:
                setattr(sys.modules[parent], leaf, module)


# ---- vLLM ----


class KVCacheLayout(enum.Enum):
    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)
    LHBNC = (0, 2, 1, 3, 4)
    BLHNC = (1, 0, 2, 3, 4)
    BLNHC = (1, 0, 3, 2, 4)
    BHLNC = (1, 2, 0, 3, 4)

    @property
    def stride_order(self):
        return self.value


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend(ABC):
    supported_dtypes = ()
    supported_kv_cache_dtypes = ()
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @classmethod
    def supported_kv_cache_layouts(cls): ...

    @classmethod
    def supports_head_size(cls, head_size): ...

    @classmethod
    def supports_compute_capability(cls, capability): ...

    @classmethod
    def supports_sink(cls): ...

    @classmethod
    def supports_sliding_window(cls): ...

    @classmethod
    def supports_non_causal(cls): ...

    @classmethod
    def supports_batch_invariance(cls): ...


class AttentionMetadataBuilder(ABC):
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False
    supports_draft_decode_metadata_update = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = (
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
        )

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata, draft_index):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata, fast_build=True)

    def update_block_table(self, metadata, blk_table, slot_mapping): ...

    def update_draft_decode_metadata(self, metadata): ...


class AttentionImpl(ABC):
    # fmt: off
    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
    ): ...
    # fmt: on

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"

    def get_class(self):
        module, _, name = self.value.rpartition(".")
        return getattr(__import__(module, fromlist=[name]), name)


def register_backend(backend, class_path=None, is_mamba=False):
    member = object.__new__(AttentionBackendEnum)
    member._name_, member._value_ = backend, class_path
    AttentionBackendEnum._member_map_[backend] = member


def _vllm():
    return {
        "vllm": {},
        "vllm.envs": dict(VLLM_BATCH_INVARIANT=False),
        "vllm.v1": {},
        "vllm.v1.kv_cache_layout": dict(KVCacheLayout=KVCacheLayout),
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": dict(
            AttentionBackend=AttentionBackend, AttentionCGSupport=AttentionCGSupport, AttentionImpl=AttentionImpl,
            AttentionMetadataBuilder=AttentionMetadataBuilder,
        ),
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": dict(
            AttentionBackendEnum=AttentionBackendEnum, register_backend=register_backend
        ),
    }  # fmt: skip


# ---- SGLang ----


class SglangAttentionBackend(ABC):
    def init_forward_metadata(self, forward_batch): ...

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): ...

    def init_forward_metadata_in_graph(self, forward_batch): ...

    def init_cuda_graph_state(self, max_bs, max_num_tokens): ...

    def get_cuda_graph_seq_len_fill_value(self): ...

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs): ...

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs): ...

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs): ...


SglangAttentionBackend.__name__ = "AttentionBackend"
ATTENTION_BACKEND_CHOICES = ["triton"]
add_attention_backend_choices = ATTENTION_BACKEND_CHOICES.extend
ATTENTION_BACKENDS = {}


def register_attention_backend(name):
    def decorator(fn):
        ATTENTION_BACKENDS[name] = fn
        return fn

    return decorator


def _sglang():
    return {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.choices": dict(
            ATTENTION_BACKEND_CHOICES=ATTENTION_BACKEND_CHOICES,
            add_attention_backend_choices=add_attention_backend_choices,
        ),
        "sglang.srt.layers": {},
        "sglang.srt.layers.attention": {},
        "sglang.srt.layers.attention.attention_registry": dict(
            ATTENTION_BACKENDS=ATTENTION_BACKENDS, register_attention_backend=register_attention_backend
        ),
        "sglang.srt.layers.attention.base_attn_backend": dict(AttentionBackend=SglangAttentionBackend),
    }
