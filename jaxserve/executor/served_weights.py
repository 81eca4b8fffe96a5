"""The weights of a LocalExecutor, which can be replaced by others of the same shapes while it serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jaxserve.checkpoint.adapted import with_adapters
from jaxserve.checkpoint.huggingface import open_tensors
from jaxserve.checkpoint.maxtext.checkpoint import stored_path
from jaxserve.checkpoint.peft import Adapter, open_adapter
from jaxserve.checkpoint.peft_modules import declared_module
from jaxserve.checkpoint.protocol import Checkpoint
from jaxserve.checkpoint.renamed import EMBEDDING, HEAD
from jaxserve.checkpoint.sentence.encoder_names import with_encoder_names
from jaxserve.checkpoint.sentence.head import with_head
from jaxserve.checkpoint.source import overridden, resolve, resolve_adapter, resolve_tower
from jaxserve.config import Config
from jaxserve.errors import CheckpointError, InvalidRequestError, invalid, shown
from jaxserve.executor.adapters import target_model
from jaxserve.executor.content_digest import LoadedFiles
from jaxserve.executor.draft_model import FREE, DraftCheckpoint
from jaxserve.executor.preparation import Preparation
from jaxserve.model_config.adapters import AdaptersConfig
from jaxserve.model_config.decoder import DecoderConfig
from jaxserve.model_config.encoder import EncoderConfig
from jaxserve.models.output_head import has_own_head
from jaxserve.models.registry import families, model_of, open_model
from jaxserve.models.skeleton import ModelSkeleton
from jaxserve.runner.backend import chip_of
from jaxserve.runner.limits import make_policy
from jaxserve.runner.runner import Runner
from jaxserve.runner.state import DeviceState
from jaxserve.weights.loader import load_adapters, load_changed, load_params

_log = logging.getLogger(__name__)


def served_tensors(prepared: Preparation, checkpoint: Checkpoint, adapters: Sequence[Adapter | None]) -> Checkpoint:
    """Return `checkpoint` with its adapters, under the names that the model gives its tensors."""
    if prepared.embedding is not None:
        model = prepared.skeleton.config
        named = checkpoint
        if isinstance(model, EncoderConfig):
            named = with_encoder_names(checkpoint, dict(model.renames))
        return named if model.head is None else with_head(named, model.head)
    shapes = prepared.skeleton.adapters
    if shapes is None:
        return checkpoint
    places = [*adapters, *[None] * (shapes.count - len(adapters))]
    return with_adapters(checkpoint, places, shapes.rank, shapes.modules)


WithMeasured = Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]
"""Returns a model's parameters with scales of the KV cache that are measured with the others (`runner.kv_scales`)."""


class ServedWeights:
    """Implements `protocol.WeightStore` for one model on this process's devices."""

    def __init__(
        self,
        config: Config,
        prepared: Preparation,
        checkpoint: Checkpoint,
        model: DecoderConfig | EncoderConfig,
        adapters: Sequence[Adapter],
        runner: Runner[Any, Any],
        state: DeviceState,
        draft: DraftCheckpoint = DraftCheckpoint(),  # noqa: B008  (immutable)
        with_measured: WithMeasured = lambda params: params,
        start: LoadedFiles | None = None,
    ) -> None:
        """checkpoint: the one that was loaded, without adapters. model: its config, as stored. adapters: opened in memory. draft: the
        draft model, which stays as it is, or the MTP layer, which is read with the model; tensors of a file do not change it. start: the files of
        `checkpoint`, for pages that outlive an update; None: there are no such pages."""
        self._config = config
        self._prepared = prepared
        self._base = checkpoint
        self._model = model
        self._start = self._files = start
        """The files of the start, and those of `_base`."""
        self._new: LoadedFiles | None = None
        """Files that were read last to replace the weights."""
        shapes = prepared.skeleton.adapters
        count = 0 if shapes is None else shapes.count
        self._adapters: list[Adapter | None] = [*adapters, *[None] * (count - len(adapters))]
        self._runner = runner
        self._state = state
        self._draft = draft
        self._with_measured = with_measured
        self._copies: tuple[np.ndarray, ...] = ()
        self._are_stored = True
        """True if the weights can be read again from `_base`; False after tensors of a file were put among them."""

    def load(self, model: str) -> Callable[[], None]:
        """Read the weights of `model` beside those that serve: until they are in use, both are on the devices."""
        path = overridden(resolve(model, progress=False, needs_tokenizer=False), self._config.model)
        mmproj = resolve_tower(self._config.images)
        self._new = files = LoadedFiles(path, mmproj)
        checkpoint = open_model(path, mmproj)
        _check_same(self._config, self._prepared, checkpoint, self._model)
        draft = self._draft.of_model(path)
        drafting = draft.load(self._prepared) if draft.is_mtp else self._draft_params()
        params = self._read(checkpoint)

        def install() -> None:
            # Measured now: two threads that start programs on several devices may start them in different orders.
            self._runner.params = self._with_measured(params) + drafting
            self._base, self._copies, self._are_stored, self._draft = checkpoint, (), True, draft
            self._files = files

        return install

    def load_tensors(self, file: str) -> Callable[[], None]:
        """Read the tensors in a safetensors file, which may be some of the model's; the others stay as they are."""
        prepared = self._prepared
        self._new = LoadedFiles(Path(file))
        tensors = open_tensors(Path(file), self._base, families())
        if prepared.embedding is not None:
            tensors = served_tensors(prepared, tensors, ())
        else:
            _check_head(tensors, self._model)
        arrays = load_changed(tensors, prepared.skeleton, prepared.sharding)
        indices = range(len(prepared.skeleton.arrays))
        if not self._runner.params:
            adapters = self._load_adapters(self._adapters) if self._adapters else {}
            arrays = adapters | arrays
            if not arrays.keys() >= set(indices):
                raise invalid("tensors", "must have all tensors of the model while the engine sleeps")
        drafting = self._draft_params()

        def install() -> None:
            params = tuple(arrays[i] if i in arrays else self._runner.params[i] for i in indices)
            self._runner.params = self._with_measured(params) + drafting
            self._copies, self._are_stored = (), False

        return install

    def new_hash(self) -> str | None:
        return None if self._new is None else self._new.hash()

    def start_hash(self) -> str | None:
        return None if self._start is None else self._start.hash()

    def load_adapter(self, place: int, name: str, source: str) -> Callable[[], None]:
        """Read the adapter for `place`, from 1. Matrices of all adapters are read, since they share arrays."""
        skeleton = self._prepared.skeleton
        assert isinstance(skeleton, ModelSkeleton) and skeleton.adapters is not None, "there is a place"
        target = target_model(skeleton.config, self._base.config)
        adapter = open_adapter(name, resolve_adapter(source), target, in_memory=True)
        _check_reserved(adapter, skeleton.adapters)
        adapters = [*self._adapters]
        adapters[place - 1] = adapter
        arrays = self._load_adapters(adapters)
        copies = tuple(_host_copy(arrays[i]) if i in arrays else copy for i, copy in enumerate(self._copies))

        def install() -> None:
            self._adapters, self._copies = adapters, copies
            self._runner.params = tuple(arrays.get(i, param) for i, param in enumerate(self._runner.params))

        return install

    def keep_adapters(self, places: Set[int]) -> None:
        """Matrices of other places stay on the device until they are read again: no request uses them."""
        self._adapters = [adapter if place in places else None for place, adapter in enumerate(self._adapters, start=1)]

    def discard(self, *, keeps_copy: bool) -> Callable[[], None]:
        copies = tuple(map(_host_copy, self._runner.params)) if keeps_copy else ()

        def apply() -> None:
            self._copies = copies
            for param in self._runner.params:
                param.delete()
            self._runner.params = ()
            self._state.release()

        return apply

    def restore(self) -> Callable[[], bool]:
        params, base, draft, files, is_same = self._runner.params, self._base, self._draft, self._files, True
        if not params and self._copies:
            draft_model = self._prepared.task.draft_model
            specs = self._prepared.skeleton.arrays + (() if draft_model is None else draft_model.skeleton.arrays)
            places = [self._prepared.sharding.place(spec.axes) for spec in specs]
            params = tuple(jax.device_put(copy, place) for copy, place in zip(self._copies, places, strict=True))
        if not params and not self._are_stored:
            raise InvalidRequestError(
                "The weights came as tensors, and no copy was kept: they cannot be read again. Update the weights first."
            )
        if not params:
            path, mmproj = stored_path(base), resolve_tower(self._config.images)
            files = LoadedFiles(path, mmproj)
            base = open_model(path, mmproj)  # the headers may have changed
            _check_same(self._config, self._prepared, base, self._model)
            draft = draft.of_model(path)
            params = self._with_measured(self._read(base)) + draft.load(self._prepared)
            is_same = self._files is None or self._files.are_unchanged()
        jax.block_until_ready(params)

        def install() -> bool:
            self._copies, self._base, self._draft, self._files = (), base, draft, files
            self._runner.params = params
            self._state.renew()
            return is_same

        return install

    def _load_adapters(self, adapters: Sequence[Adapter | None]) -> dict[int, jax.Array]:
        """Return the arrays of all adapters on the devices, by their index among those of the model."""
        skeleton = self._prepared.skeleton
        assert isinstance(skeleton, ModelSkeleton), "it has adapters"
        tensors = served_tensors(self._prepared, self._base, adapters)
        return load_adapters(tensors, skeleton, self._prepared.sharding)

    def _draft_params(self) -> tuple[jax.Array, ...]:
        """Return the parameters of the draft model, read again if they are not on the device; none without one."""
        held = self._runner.params[len(self._prepared.skeleton.arrays) :]
        return held or self._draft.load(self._prepared)

    def _read(self, checkpoint: Checkpoint) -> tuple[jax.Array, ...]:
        """Return the model's parameters; scales that are to be measured are 1."""
        tensors = served_tensors(self._prepared, checkpoint, self._adapters)
        prepared = self._prepared
        return load_params(tensors, prepared.skeleton, prepared.sharding, lambda done, total, name: None)


def _host_copy(param: jax.Array) -> np.ndarray:
    """Return an array's content in memory of its own. jax copies it, but not from one CPU device."""
    is_shared = param.is_fully_replicated and all(device.platform == "cpu" for device in param.devices())
    return np.array(param) if is_shared else np.asarray(param)


def _check_reserved(adapter: Adapter, shapes: AdaptersConfig) -> None:
    """Raise InvalidRequestError for an adapter that needs more than was reserved at the start."""
    if adapter.rank > shapes.rank:
        raise invalid(
            "lora_path", f"the adapter has rank {adapter.rank}, and {shapes.rank} are reserved (--max-lora-rank)"
        )
    if others := set(map(declared_module, adapter.additions)) - set(shapes.modules):
        raise invalid(
            "lora_path", f"the adapter changes {shown(min(others))}, for which nothing is reserved (--max-loras)"
        )


def _check_head(tensors: Checkpoint, served: DecoderConfig | EncoderConfig) -> None:
    """Raise CheckpointError if some tensors have an output head that differs from their embedding matrix, which is the head that is
    served. A head alone is not read: trainers send the matrix, of which it is a copy, in an earlier file."""
    if not isinstance(served, DecoderConfig) or not served.tied_embeddings or HEAD not in tensors.tensors:
        return
    if EMBEDDING not in tensors.tensors:
        _log.warning("%s: %s is not read, the output head is %s", tensors.path, HEAD, EMBEDDING)
    elif has_own_head(tensors):
        raise CheckpointError(
            f"{tensors.path}: {HEAD} must equal {EMBEDDING}, which is the output head of the model that is served"
        )


def _check_same(
    config: Config, prepared: Preparation, checkpoint: Checkpoint, served: DecoderConfig | EncoderConfig
) -> None:
    """Raise CheckpointError unless the programs, made for the model that is served, compute what `checkpoint` describes."""
    found = model_of(checkpoint)
    if isinstance(served, DecoderConfig) and isinstance(found, DecoderConfig):
        policy = make_policy(config, found, chip_of(prepared.device))
        quant = policy.quant
        found = replace(found, **{name: getattr(served, name) for name in FREE})
        used = prepared.skeleton.policy.quant
        for module, kind in sorted(set(quant.stored_kinds) - set(used.stored_kinds)):
            _differ(checkpoint, f"{module}.weight", dict(used.stored_kinds).get(module, "not in blocks"), kind)
        for each in fields(used):
            old, new = getattr(used, each.name), getattr(quant, each.name)
            if old != new:
                _differ(checkpoint, "quantization" if each.name == "name" else f"quantization.{each.name}", old, new)
        scales = prepared.skeleton.policy.kv_scales
        if policy.kv_scales != scales:
            _differ(checkpoint, "kind of scales of the KV cache", scales, policy.kv_scales)
    if type(served) is not type(found):
        _differ(checkpoint, "architecture", type(served).__name__, type(found).__name__)
    for field in fields(served):
        if getattr(served, field.name) != getattr(found, field.name):
            _differ(checkpoint, field.name, getattr(served, field.name), getattr(found, field.name))


def _differ(checkpoint: Checkpoint, name: str, served: object, found: object) -> NoReturn:
    raise CheckpointError(
        f"{checkpoint.path}: {name} is {shown(str(found))} and, in the model that is served, {shown(str(served))}: only "
        "weights of the same shapes and types can replace others"
    )
