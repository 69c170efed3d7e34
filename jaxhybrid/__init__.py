"""jaxhybrid: hybrid attention and recurrent language models, with the cache as a value."""

from jaxhybrid import checked
from jaxhybrid.adapters import (
    Lora,
    apply_lora,
    init_lora,
    load_adapter,
    merge_lora,
    save_adapter,
)
from jaxhybrid.batch import Batch, Ubatch, make_ubatch
from jaxhybrid.beam import beam_search, best_of_n
from jaxhybrid.cache import (
    Cache,
    Snapshot,
    can_shift,
    checkpoint,
    clear,
    create_cache,
    fork,
    gather,
    is_lossy,
    restorable_positions,
    rewind,
    roll_back,
    seq_add,
    seq_cp,
    seq_div,
    seq_keep,
    seq_pos_max,
    seq_pos_min,
    seq_rm,
    state_bytes,
    try_rewind,
)
from jaxhybrid.conversion import convert
from jaxhybrid.driver import decode
from jaxhybrid.embedding import embed
from jaxhybrid.engine import generate, load, stream
from jaxhybrid.errors import BatchError, CacheFullError, CheckpointError, JaxHybridError, RefusedError
from jaxhybrid.files import (
    load_cache,
    load_params,
    load_sequence,
    save_cache,
    save_params,
    save_sequence,
    write_gguf,
)
from jaxhybrid.hparams import Hparams
from jaxhybrid.inspection import inspect
from jaxhybrid.model import forward, init_params, spec, step
from jaxhybrid.params import Params
from jaxhybrid.settings import Model, Result, Settings
from jaxhybrid.weights import quantize

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "BatchError",
    "Cache",
    "CacheFullError",
    "CheckpointError",
    "Hparams",
    "JaxHybridError",
    "Lora",
    "Model",
    "Params",
    "RefusedError",
    "Result",
    "Settings",
    "Snapshot",
    "Ubatch",
    "apply_lora",
    "beam_search",
    "best_of_n",
    "can_shift",
    "checked",
    "checkpoint",
    "clear",
    "convert",
    "create_cache",
    "decode",
    "embed",
    "fork",
    "forward",
    "gather",
    "generate",
    "init_lora",
    "init_params",
    "inspect",
    "is_lossy",
    "load",
    "load_adapter",
    "load_cache",
    "load_params",
    "load_sequence",
    "make_ubatch",
    "merge_lora",
    "quantize",
    "restorable_positions",
    "rewind",
    "roll_back",
    "save_adapter",
    "save_cache",
    "save_params",
    "save_sequence",
    "seq_add",
    "seq_cp",
    "seq_div",
    "seq_keep",
    "seq_pos_max",
    "seq_pos_min",
    "seq_rm",
    "spec",
    "state_bytes",
    "step",
    "stream",
    "try_rewind",
    "write_gguf",
]
