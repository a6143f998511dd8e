"""Where the weights of one model and the states of its optimizers are: on the device or the host.

Settings say it, or leave it to the plans: weights that do not fit on the device are moved to the
host (`HostWeights`), and a plan may be found only with them there. `WeightPlacement` moves them,
tells the plans, and loads them while they are used. How they are copied is in `offload.weights`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sppo_hf.config import SPPOConfig
from sppo_hf.engine.action_log import ActionLog, TraceFolder
from sppo_hf.engine.device_facts import device_facts, model_shape
from sppo_hf.engine.model_parts import ModelParts, all_modules, own_parameters
from sppo_hf.engine.plan_cache import PlanCache, PlannedOffload
from sppo_hf.engine.step_observer import StepObserver
from sppo_hf.offload.weights import HostWeights, can_be_host_resident
from sppo_hf.planning.choices import Placement, read_budgets, read_placements
from sppo_hf.planning.memory import standing_device_bytes
from sppo_hf.planning.plan import Plan
from sppo_hf.schedule.actions import Action


class WeightPlacement:
    """Places the weights of one model, and the states of the optimizers that update them."""

    def __init__(
        self,
        parts: ModelParts,
        config: SPPOConfig,
        plans: PlanCache,
        planned_offload: PlannedOffload,
        observer: StepObserver,
        traces: TraceFolder | None,
    ) -> None:
        """Begin with all weights where they are; moves nothing."""
        self._parts = parts
        self._config = config
        self._plans = plans
        self._planned_offload = planned_offload
        self.observer = observer
        self._traces = traces
        self.weights: HostWeights | None = None
        """The host-resident weights; None while all weights are on the device."""
        self._settings = config
        """`config`, with `weights` and `optimizer` set to where these are now."""
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int | None] = (
            weakref.WeakKeyDictionary()
        )
        """Optimizers whose states follow the weights, with the host memory that these states take
        in bytes (see `unpinned_host_bytes`); None if an update may have changed it."""
        self._placed: list[tuple[int, bool]] = []
        """Identity of each of the model's parameters when weights were moved to the host, and
        whether it trained."""

    def copy_settings(self, other: WeightPlacement) -> None:
        """Place weights as `other`, of a model that this one's is a copy of, from the next step."""
        self._settings = other._settings
        self._plans.set_placement(self._settings)

    def close(self) -> None:
        """Put all weights back on the device for good, and free host memory."""
        weights, self.weights = self.weights, None
        if weights is not None:
            weights.close()

    def place(self, device: torch.device) -> None:
        """Move weights to the host as the settings say, and everything else to `device`.

        Does nothing at the second call, or if no weights are to be on the host. Trained weights are
        where their optimizer is; adapters of host-resident frozen layers go with them.
        """
        if self.weights is None:
            self._place(device)

    def update_trainable(
        self, device: torch.device, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """Note which parameters train now, and place weights again if these have changed.

        Resizing embeddings may put other parameters into the model.
        """
        self._plans.update_trainable(parameters)
        if self.weights is not None and self._placed != _identities(parameters):
            self._place(device)

    def _place(self, device: torch.device) -> None:
        frozen, trained = self._settings.host_resident
        if not frozen and not trained:
            if self.weights is not None:
                self.weights.close()
                self.weights = None
            return
        if self.weights is not None:
            self.weights.release()
        layers, others = _host_resident_parameters(self._parts, frozen=frozen, trained=trained)
        on_host = {id(p) for group in [*layers, others] for p in group}
        for module in self._parts.causal_lm.modules():
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in on_host and parameter.device != device:
                    parameter.data = parameter.data.to(device)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != device:
                    module._buffers[name] = buffer.to(device)
        copier = self._planned_offload.copier(device)
        self._placed = _identities(own_parameters(all_modules(self._parts.causal_lm)))
        self.weights = HostWeights(
            layers,
            others,
            copier=copier,
            keep_device_copies=self._settings.weights != "host",
            locker=copier.page_locker if self._config.use_pin_memory else None,
            previous=self.weights,
            progress=self.observer.on_host_memory,
        )
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                if self.weights.has(parameter):
                    state.update(
                        (name, value.to("cpu"))
                        for name, value in state.items()
                        if isinstance(value, Tensor)
                    )
            self._optimizers[optimizer] = None

    def register_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        states_bytes: int | None,
        device_only_reason: str = "",
    ) -> None:
        """Take note of an optimizer that will update the model, which may be on the host.

        `states_bytes` is the size of its states, None if unknown; `device_only_reason` says why its
        weights must be on the device, as a part of a sentence.
        """
        if optimizer in self._optimizers:
            return
        self._optimizers[optimizer] = None
        known = self._optimizers  # not this object, which the optimizer's hooks would keep alive
        # Wrappers that skip Optimizer.__init__ may have no such hooks.
        with contextlib.suppress(AttributeError):
            optimizer.register_step_post_hook(lambda one, *_: known.update({one: None}))
            optimizer.register_load_state_dict_post_hook(lambda one: known.update({one: None}))
        if states_bytes is not None:
            self._plans.optimizer_bytes = states_bytes + (self._plans.optimizer_bytes or 0)
        if len(self._optimizers) == 1 or device_only_reason:
            self._plans.device_only_reason = device_only_reason

    def move_to_host_if_too_large(self, device: torch.device) -> None:
        """Move weights to the host if settings allow it and they do not fit on the device."""
        if self._plans.device_only_reason or self.weights is not None:
            return
        facts = device_facts(device, self._config)
        budget = read_budgets(self._config, facts).device
        if budget is None or len(read_placements(self._config, facts)) == 1:
            return
        whole = replace(
            model_shape(self._parts, device), optimizer_bytes=self._plans.optimizer_bytes
        )
        default, *others = read_placements(self._config, facts, adapters=whole.lora is not None)

        def standing_bytes(places: Placement) -> int:
            shape = whole.with_host_residents(weights=places.weights, optimizer=places.optimizer)
            return standing_device_bytes(shape, device.type)

        if others and standing_bytes(default) > budget:
            fitting = (places for places in others if standing_bytes(places) <= budget)
            self.set_places(next(fitting, others[-1]), device)

    def place_as_planned(self, plan: Plan, device: torch.device) -> None:
        """Move weights to the host if settings leave that open and the plan has them there."""
        residents = plan.shape.host_resident
        if residents is None or not plan.training:
            return
        if self.weights is None or self.weights.keep_device_copies != residents.keeps_device_copies:
            places = Placement(
                weights=not residents.keeps_device_copies, optimizer=residents.gradient_bytes > 0
            )
            self.set_places(places, device, plan)

    def set_places(self, places: Placement, device: torch.device, plan: Plan | None = None) -> None:
        """Move weights and optimizer to `places`, and plan so; keeps `plan`, made for these."""
        settings = places.set_in(self._config)
        if not places.weights:
            # Longer rows may still move them to the host.
            settings = settings.replace(weights=self._config.weights)
        self._settings = settings
        self._plans.set_placement(settings, plan)
        self._place(device)

    def return_layers_to_device(self, device: torch.device) -> None:
        """Move weights back that the planner had put on the host for a run layer by layer."""
        if self._config.weights == "auto" and self._settings.weights == "host":
            self._settings = self._settings.replace(weights="device")
            self._plans.set_placement(self._settings)
            self._place(device)

    def unpinned_host_bytes(self) -> int:
        """Pageable host memory of gradients and optimizer states of host-resident weights.

        Plans count these bytes, so they are added to the host's free memory. Weights are not: they
        may be mapped from a file, and are counted twice if they are not pinned.
        """
        if self.weights is None:
            return 0
        total = sum(tensor.nbytes for tensor in self.weights.gradients if not tensor.is_pinned())
        for optimizer, known_bytes in list(self._optimizers.items()):
            if known_bytes is None:
                # Kept, since every forward calls this and there are many states.
                known_bytes = self._optimizers[optimizer] = self._states_bytes(optimizer)
            total += known_bytes
        return total

    def _states_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        """Pageable host memory of an optimizer's states of host-resident weights."""
        assert self.weights is not None, "called for host-resident weights only"
        states = (
            value
            for parameter, state in optimizer.state.items()
            if self.weights.has(parameter)
            for value in state.values()
            if isinstance(value, Tensor) and value.device.type == "cpu"
        )
        return sum(value.nbytes for value in states if not value.is_pinned())

    def begin_update(self) -> None:
        """Called before the optimizer's step, which finds weights and gradients on the host."""
        if self.weights is not None:
            # A forward whose loss was dropped leaves weights on the device.
            self.weights.move_to_host(keep_writes=True)
            if self._traces is not None:
                self._traces.begin_update()

    def end_update(self) -> None:
        """Called after the optimizer's step."""
        if self.weights is not None and self._traces is not None:
            self._traces.end_update()

    @contextlib.contextmanager
    def loaded(self, *, backward_follows: bool, log: ActionLog | None = None) -> Iterator[None]:
        """Context of a forward, in which host-resident weights are loaded when they are used."""
        if self.weights is None:
            yield
            return
        self.weights.on_fetch = None if log is None else functools.partial(_log_weights, log)
        self.weights.start_forward()
        try:
            yield
        except BaseException:
            self.weights.move_to_host()
            raise
        if not backward_follows:
            self.weights.move_to_host()


def _identities(parameters: Sequence[torch.nn.Parameter]) -> list[tuple[int, bool]]:
    return [(id(parameter), parameter.requires_grad) for parameter in parameters]


def _log_weights(log: ActionLog, layer: int, backward: bool) -> None:
    log.note(Action("P", 0, 0, layer, int(backward)))


def _host_resident_parameters(
    parts: ModelParts, *, frozen: bool, trained: bool
) -> tuple[list[list[torch.nn.Parameter]], list[torch.nn.Parameter]]:
    """Host-resident parameters of each decoder layer, and those outside of the layers.

    `frozen` and `trained` as in `SPPOConfig.host_resident`. A parameter that several layers share
    counts as outside; of the others only trained ones do.
    """
    owners: dict[int, set[int]] = {}
    for index, layer in enumerate(parts.layers):
        for parameter in layer.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    layers: list[list[torch.nn.Parameter]] = [[] for _ in parts.layers]
    others: list[torch.nn.Parameter] = []
    for parameter in parts.causal_lm.parameters():
        layer_indices = owners.get(id(parameter), set())
        wanted = trained if parameter.requires_grad else frozen
        if not wanted or not can_be_host_resident(parameter):
            continue
        if len(layer_indices) == 1:
            layers[next(iter(layer_indices))].append(parameter)
        elif parameter.requires_grad or layer_indices:
            others.append(parameter)
    return layers, others
