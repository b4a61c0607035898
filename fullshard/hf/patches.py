"""The places in other libraries that fullshard replaces, in one table, and how they are replaced.

`fullshard launch` calls `install()` in every process before the script runs. A patch is put in place right after the
library's module has been imported, before anything else can import a name from it. Nothing is imported here: a script
that does not use a library pays nothing for its patches. `docs/integrations.md` lists the patches for users.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fullshard.config.errors import ConfigError
from fullshard.distributed import engines
from fullshard.version import version_numbers

VARIABLE = "FULLSHARD_INTEGRATIONS"
"""The environment variable that `fullshard launch --no_integrations` sets to `off`."""
OLDEST = {"accelerate": "1.15", "transformers": "5.17", "trl": "1.16"}
"""The oldest version of each library that the patches fit. Whether a newer one still has what they need is read from
its source (`missing`). The versions of torch are fullshard's own requirement."""
_HOME = "fullshard.hf."
TORCH_FSDP = (
    "summon_full_params", "state_dict_type", "set_state_dict_type", "get_state_dict_type", "optim_state_dict",
    "optim_state_dict_to_load", "full_optim_state_dict", "sharded_optim_state_dict", "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict", "flatten_sharded_optim_state_dict", "rekey_optim_state_dict",
)  # fmt: skip
"""The static methods of torch's `FullyShardedDataParallel`, which scripts call with a model; all but `fsdp_modules`, by
which torch's own checkpoints recognize modules of that class."""


@dataclass(frozen=True)
class Patch:
    """One replaced attribute of another library."""

    module: str
    """The module that defines it."""
    attribute: str
    """Its name there, `Class.method` for a method."""
    replacement: str
    """`module:function`; the function takes the original and returns what replaces it."""
    needs: str
    """The parameters of the original that the replacement relies on."""
    why: str


PATCHES = (
    Patch(
        "accelerate.state", "PartialState.__init__", f"{_HOME}accelerate_state:partial_state",
        "self cpu",
        "fullshard sets up the process group and chooses the device, on CPUs too",
    ),
    Patch(
        "accelerate.state", "AcceleratorState.__init__", f"{_HOME}accelerate_state:accelerator_state",
        "self fsdp_plugin",
        "FSDP is on for CPU ranks and for one process as well",
    ),
    Patch(
        "accelerate.utils.dataclasses", "FullyShardedDataParallelPlugin.__init__", f"{_HOME}accelerate_state:plugin",
        "fsdp_version reshard_after_forward cpu_offload backward_prefetch state_dict_type "
        "auto_wrap_policy transformer_cls_names_to_wrap min_num_params activation_checkpointing "
        "activation_checkpointing_offload ignored_modules mixed_precision_policy "
        "cpu_ram_efficient_loading",
        "the strategy and its options are read by fullshard, before the plugin drops some of them",
    ),
    Patch(
        "accelerate.utils.dataclasses", "FullyShardedDataParallelPlugin.set_state_dict_type",
        f"{_HOME}accelerate_state:set_state_dict_type",
        "self state_dict_type",
        "the type can change between saves: Accelerate keeps the options of the first type",
    ),
    Patch(
        "accelerate.accelerator", "Accelerator.prepare", f"{_HOME}accelerate_prepare:prepare",
        "self device_placement",
        "models, optimizers and loaders in any order and number, a model alone included",
    ),
    Patch(
        "accelerate.accelerator", "Accelerator.prepare_model", f"{_HOME}accelerate_prepare:prepare_model",
        "self model device_placement evaluation_mode",
        "the model is sharded by fullshard, one for evaluation only too",
    ),
    Patch(
        "accelerate.accelerator", "Accelerator.no_sync", f"{_HOME}accelerate_prepare:no_sync",
        "self model",
        "gradient accumulation is the engine's",
    ),
    Patch(
        "accelerate.accelerator", "Accelerator.clip_grad_norm_", f"{_HOME}accelerate_prepare:clip_grad_norm",
        "self parameters max_norm norm_type",
        "the norm is exact on every mesh",
    ),
    Patch(
        "accelerate.accelerator", "Accelerator.gather_for_metrics", f"{_HOME}accelerate_mesh:gather_rows",
        "self input_data use_gather_object",
        "ranks that share rows (`tp_size`) count once",
    ),
    Patch(
        "accelerate.parallelism_config", "ParallelismConfig._validate_accelerator",
        f"{_HOME}accelerate_mesh:validate_mesh",
        "self accelerator",
        "a mesh of tensor parallelism alone is served too",
    ),
    Patch(
        "accelerate.accelerator", "Accelerator.get_state_dict", f"{_HOME}accelerate_prepare:get_state_dict",
        "self model unwrap",
        "tied weights stay one tensor, which `save_pretrained` writes once",
    ),
    Patch(
        "accelerate.accelerator", "Accelerator.clip_grad_value_", f"{_HOME}accelerate_prepare:clip_grad_value",
        "self parameters clip_value",
        "Accelerate refuses it under FSDP",
    ),
    Patch(
        "accelerate.accelerator", "Accelerator.join_uneven_inputs", f"{_HOME}accelerate_prepare:join_uneven_inputs",
        "self joinables even_batches",
        "ranks with fewer batches would leave the others waiting",
    ),
    Patch(
        "accelerate.utils.fsdp_utils", "save_fsdp_model", f"{_HOME}accelerate_checkpoints:save_model",
        "fsdp_plugin accelerator model output_dir model_index",
        "a folder that is being written over does not look complete",
    ),
    Patch(
        "accelerate.utils.fsdp_utils", "save_fsdp_optimizer", f"{_HOME}accelerate_checkpoints:save_optimizer",
        "fsdp_plugin accelerator optimizer model output_dir optimizer_index",
        "the same for the optimizer",
    ),
    Patch(
        "accelerate.utils.fsdp_utils", "load_fsdp_model", f"{_HOME}accelerate_checkpoints:load_model",
        "fsdp_plugin accelerator model input_dir model_index",
        "a checkpoint is read in the form it has, also that of a run without FSDP",
    ),
    Patch(
        "accelerate.utils.fsdp_utils", "load_fsdp_optimizer", f"{_HOME}accelerate_checkpoints:load_optimizer",
        "fsdp_plugin accelerator optimizer model input_dir optimizer_index",
        "the same for the optimizer",
    ),
    Patch(
        "transformers.training_args", "TrainingArguments._process_fsdp_args", f"{_HOME}trainer:fsdp_arguments",
        "self",
        "`fsdp` and `fsdp_config` are read by fullshard, hybrid strategies and prefetching included",
    ),
    Patch(
        "transformers.trainer", "Trainer.save_model", f"{_HOME}trainer:save_model",
        "self output_dir _internal_call",
        "whole weights are written whatever the state-dict type",
    ),
    Patch(
        "transformers.core_model_loading", "_materialize_copy", f"{_HOME}lazy_parameters:materialize",
        "tensor device dtype",
        "weights stay in their files until they are used or sharded",
    ),
    Patch(
        "transformers.core_model_loading", "WeightConverter.convert", f"{_HOME}lazy_parameters:convert",
        "self layer_name model hf_quantizer",
        "the same for weights that transformers puts together from several tensors, such as fused experts",
    ),
    Patch(
        "transformers.modeling_utils", "PreTrainedModel.from_pretrained", f"{_HOME}four_bit:from_pretrained",
        "cls pretrained_model_name_or_path",
        "`BitsAndBytesConfig(load_in_4bit=True)` gives fullshard's 4-bit layers, which can be sharded",
    ),
    Patch(
        "transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer.update_device_map",
        f"{_HOME}four_bit:load_on_host",
        "self device_map",
        "files that hold 4-bit weights are loaded on the host, as others are",
    ),
    Patch(
        "trl.models.utils", "prepare_fsdp", f"{_HOME}trainer:prepare_fsdp",
        "model accelerator",
        "reference models are sharded by fullshard",
    ),
    *(
        Patch(
            "torch.distributed.fsdp.fully_sharded_data_parallel", f"FullyShardedDataParallel.{name}",
            f"{_HOME}torch_fsdp:{name}", "",
            "models that fullshard has sharded are served, or it is refused by name",
        )
        for name in TORCH_FSDP
    ),
)  # fmt: skip
"""Everything that is replaced, by library."""


def install() -> None:
    """Patch modules as they are imported. For processes of `fullshard launch`, before the script."""
    if os.environ.get(VARIABLE, "on").lower() not in ("off", "0", "false", "no"):
        sys.meta_path.insert(0, _Finder(_chosen()))


def _chosen() -> dict[str, list[Callable[[ModuleType], None]]]:
    """What is done to a module once it is imported, by the module's name."""
    changes: dict[str, list[Callable[[ModuleType], None]]] = {}
    if engines.current().drives_machine:
        return {"accelerate.accelerator": [_refuse_on_xla]}
    if not missing("accelerate"):
        for patch in PATCHES:
            if not missing(_library(patch)):
                changes.setdefault(patch.module, []).append(functools.partial(_replace, patch))
    for library, module, attribute in (
        ("accelerate", "accelerate.accelerator", "Accelerator.__init__"),
        ("transformers", "transformers.trainer", "Trainer.__init__"),
        ("trl", "trl.trainer.base_trainer", "_BaseTrainer.__init__"),
    ):
        if missing(library):
            changes.setdefault(module, []).append(functools.partial(_announce_fallback, library, attribute))
    return changes


@functools.cache
def missing(library: str) -> tuple[str, ...]:
    """What the patches need and the installed version of a library lacks, by name; nothing of it is imported."""
    try:
        version = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ()
    package = importlib.util.find_spec(library)
    if library not in OLDEST or package is None or not package.submodule_search_locations:
        return ()
    if version_numbers(version) < version_numbers(OLDEST[library]):
        return (f"{library} {OLDEST[library]} or newer",)
    folder = Path(next(iter(package.submodule_search_locations)))
    return tuple(lack for patch in PATCHES if _library(patch) == library and (lack := _lack(patch, folder)))


def _library(patch: Patch) -> str:
    return patch.module.split(".")[0]


def _lack(patch: Patch, folder: Path) -> str:
    """What a library in a folder lacks for a patch; empty if the patch fits. A new parameter must be optional."""
    file = folder.joinpath(*patch.module.split(".")[1:])
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    if not file.is_file():
        return patch.module
    parameters = _parameters(ast.parse(file.read_bytes()), patch.attribute)
    name, needs = f"{patch.module}.{patch.attribute}", patch.needs.split()
    if parameters is None:
        return name
    required = {parameter for parameter, optional in parameters.items() if not optional}
    return "" if required <= set(needs) <= set(parameters) else f"{name}({', '.join(needs)})"


def _parameters(module: ast.Module, attribute: str) -> dict[str, bool] | None:
    """The parameters of a function or method by name, and whether each is optional; None if it is not defined there."""
    path, _, name = attribute.rpartition(".")
    owner: ast.AST | None = module
    if path:
        owner = next((node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name == path), None)
    if owner is None:
        return None
    functions = (node for node in ast.walk(owner) if isinstance(node, ast.FunctionDef) and node.name == name)
    if function := next(functions, None):
        of = function.args
        by_position = [*of.posonlyargs, *of.args]
        first_optional = len(by_position) - len(of.defaults)
        optional = {one.arg: i >= first_optional for i, one in enumerate(by_position)}
        return optional | {
            one.arg: default is not None for one, default in zip(of.kwonlyargs, of.kw_defaults, strict=True)
        }
    if name == "__init__" and isinstance(owner, ast.ClassDef) and owner.decorator_list:  # a dataclass: its fields
        fields = (node for node in owner.body if isinstance(node, ast.AnnAssign))
        return {node.target.id: node.value is not None for node in fields if isinstance(node.target, ast.Name)}
    return None


def _replace(patch: Patch, module: ModuleType) -> None:
    owner, name = _owner(module, patch.attribute)
    attribute = vars(owner)[name]
    kind = type(attribute) if isinstance(attribute, classmethod | staticmethod) else None
    original = attribute.__func__ if kind else attribute

    @functools.cache
    def replacement() -> Callable[..., Any]:
        home, function = patch.replacement.split(":")
        return getattr(importlib.import_module(home), function)(original)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        # Imported at the first call: the library's own import is still under way when a patch is put in place.
        return replacement()(*args, **kwargs)

    setattr(owner, name, kind(replaced) if kind else replaced)


def _refuse_on_xla(module: ModuleType) -> None:
    """Refuse scripts that use Accelerate on the XLA engine, at first use."""

    def refusing(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            "scripts for Accelerate, transformers' Trainer and TRL are run by the torch engine; on XLA use "
            "fullshard.prepare or fullshard.SFTTrainer in the script, fullshard sft, or --no_integrations for "
            "Accelerate's own engine"
        )

    module.Accelerator.__init__ = refusing


def _announce_fallback(library: str, attribute: str, module: ModuleType) -> None:
    """Report at first use that a library's own engine runs, and what it lacks for fullshard's."""
    owner, name = _owner(module, attribute)
    original = getattr(owner, name)

    @functools.wraps(original)
    def announcing(self: Any, *args: Any, **kwargs: Any) -> None:
        from fullshard.distributed import runtime

        runtime.warn_once(
            f"{library} lacks a patched name",
            f"{library} {importlib.metadata.version(library)} lacks what fullshard's integrations need "
            f"({'; '.join(missing(library))}), so {library} runs as it is, on its own engine. Install a version that "
            f"has it ({library} {OLDEST[library]} does), or use --no_integrations to leave this message out",
        )
        original(self, *args, **kwargs)

    setattr(owner, name, announcing)


def _owner(module: ModuleType, attribute: str) -> tuple[Any, str]:
    path, _, name = attribute.rpartition(".")
    return (getattr(module, path) if path else module), name


class _Finder:
    """Finds modules as Python would, and has some of them changed right after they ran."""

    def __init__(self, changes: dict[str, list[Callable[[ModuleType], None]]]):
        self.changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        changes = self.changes.pop(name, None)  # popped first: the search below comes by here again
        if changes is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for change in changes:
                change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
