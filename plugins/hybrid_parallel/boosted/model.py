"""HybridParallelModel: this rank's shard of the model, as `boost` returns it, and how it is saved whole.

Scripts call `save_pretrained`, `push_to_hub` and `state_dict` on the boosted model, on what `unwrap` or `model.module`
gives, or on an encoder inside of it. All ranks do, as under DistributedDataParallel with `is_main_process`; or rank 0
alone, for which the others write files.
"""

from __future__ import annotations

import copy
import inspect
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from booster import failure
from booster.errors import ConfigurationError
from booster.logging import get_logger
from plugins.hybrid_parallel.boosted.forward_options import ForwardOptions
from plugins.hybrid_parallel.boosted.model_api import ModelApi, WholeModel, method_as_declared
from plugins.hybrid_parallel.config.groups import PipelineOptions
from plugins.hybrid_parallel.data.checks import FIRST_STEPS, check_batch
from plugins.hybrid_parallel.data.microbatch import cast_inputs, has_floats, to_device
from plugins.hybrid_parallel.distributed.agreement import raise_on_all_ranks
from plugins.hybrid_parallel.distributed.mesh import EP, HybridMesh
from plugins.hybrid_parallel.guards import GuardedModel, LocalState, WholeState, check_tied, refuse_backward
from plugins.hybrid_parallel.loss.choice import LossChoice
from plugins.hybrid_parallel.loss.step_loss import ScoresAsked, TokenLogProbs, next_tokens
from plugins.hybrid_parallel.pipeline.runtime import PipelineRuntime, StepTrace
from plugins.hybrid_parallel.step.outputs import with_whole_logits, with_whole_sequences
from plugins.hybrid_parallel.step.passes import AroundPass, Batch, Pass, PassKind, in_pass
from plugins.hybrid_parallel.step.user_loop import UserLoop, run_one_stage
from plugins.hybrid_parallel.zero.bucket_layout import TiedParameter
from plugins.hybrid_parallel.zero.optimizer import clip_grad_norm_
from plugins.hybrid_parallel.zero.reducer import GradientReducer
from plugins.hybrid_parallel.zero.stage3 import ParameterGathers
from shardformer.distributed.collectives import copy_to_region
from shardformer.distributed.process_groups import all_gather_json
from shardformer.distributed.random import SharedStream
from shardformer.generation import generate_by
from shardformer.peft.kinds import is_a
from shardformer.shard_spec import annotate, grad_group_of, parameter_like, spec_of
from shardformer.stages.placeholders import StagePlaceholder

if TYPE_CHECKING:
    from plugins.hybrid_parallel.reproducible.feature import Units


def copy_module(module: nn.Module, mesh: HybridMesh, memo: dict[int, Any]) -> nn.Module:
    """Make a deep copy of a sharded model, on the same ranks; `memo`: of `copy.deepcopy`, gets the parameters."""
    for shared in _shared(module, mesh):
        memo[id(shared)] = shared
    for parameter in module.parameters():
        made = memo[id(parameter)] = parameter_like(parameter, parameter.detach().clone())
        if (spec := getattr(parameter, "shard_spec", None)) is not None:
            annotate(made, spec, grad_group_of(parameter))
    return copy.deepcopy(module, memo)


def _shared(module: nn.Module, mesh: HybridMesh) -> Iterator[Any]:
    """Yield the objects that copies share: process groups cannot be copied, and pipeline passes run one at a time."""
    yield from (*mesh.axis_groups.values(), mesh.replica_group)
    for each in module.modules():
        for value in vars(each).values():
            if isinstance(value, ProcessGroup):
                yield value
            elif isinstance(group := getattr(value, "group", None), ProcessGroup):
                yield group
        if (views := vars(each).get("stage_views")) is not None:
            yield views.stage_input


class HybridParallelModel(ModelApi):
    """This rank's shard of a model.

    It is called like the wrapped model: `model(**batch)`. The loss in its outputs is the mean over the global batch of
    all data-parallel ranks, so all of them must call it.

    Args:
        runtime: runs micro-batches through the stages of the sharded model that this rank holds.
        origin: description of the whole model, for saving and loading.
        tied: the parameters that other stages hold too.
        stream: the random stream of replicated regions; None on a single rank, which keeps torch's own.
        pipeline: how a batch is split into micro-batches.
        units: cuts batches into units under `reproducible=True`.

    Attributes:
        saved_elsewhere: parameters on this rank that another stage saves.
        batches_seen: number of training batches so far.
        checked_full_batch: whether a batch has filled the pipeline; from then on batches may be short.
        before_steps: what features run before a step, or its passes that compute gradients; on all ranks.
        around_passes: what features hang around each pass; see `in_pass`.
        around_losses: what they hang around the backward pass of a loss that a script computes.
        token_counts: returns the tokens of each expert in the last step; None if they are not counted.
    """

    def __init__(
        self,
        runtime: PipelineRuntime,
        origin: WholeModel,
        tied: Mapping[nn.Parameter, TiedParameter],
        stream: SharedStream | None,
        pipeline: PipelineOptions,
        units: Units | None = None,
    ) -> None:
        module, mesh = runtime.module, runtime.mesh
        super().__init__(module, mesh)
        self.runtime, self.origin, self.tied, self.stream = runtime, origin, tied, stream
        self.units, self.pipeline = units, pipeline
        self.saved_elsewhere = frozenset(param for param, tie in tied.items() if not tie.counted)
        self.losses = LossChoice(module, mesh, units is not None, pipeline.contrastive == "global")
        self.head_loss = self.losses.head_loss
        self.trace = StepTrace()
        self.before_steps: list[Callable[[], None]] = []
        self.gathers, self.batches_seen = ParameterGathers(), 0
        self.around_passes: list[AroundPass] = [] if self.stream is None else [self._draw_from_stream]
        self.around_losses: list[AroundPass] = []
        self.checked_full_batch = self._layers_cast = False
        self.token_counts: Callable[[], dict[str, Tensor]] | None = None
        self.options = ForwardOptions(module, mesh)
        write_whole(self)
        self.take_whole_states()
        generate_by(self.options.inside, lambda *args, **kwargs: self.generate(*args, **kwargs))
        self.finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> HybridParallelModel:
        """Copy the weights to a new model on the same ranks, without an optimizer: for averages of weights (EMA)."""
        with self.summon_full_params(writeback=False):
            module = copy_module(self.module, self.mesh, memo)
        runtime = PipelineRuntime(module, self.mesh, self.runtime.schedule, self.runtime.num_chunks)
        tied = {memo[id(param)]: tie for param, tie in self.tied.items()}
        made = HybridParallelModel(runtime, self.origin, tied, self.stream, self.pipeline, self.units)
        refuse_backward(made)
        made.files.io, made.training = self.files.io, self.training  # the flags of inner modules are copied already
        return made

    @cached_property
    def user_loop(self) -> UserLoop:
        """Calls of this model by the user's own loop."""
        return UserLoop(self)

    @property
    def reducers(self) -> list[GradientReducer]:
        """The reducers of the model's optimizers."""
        return [optimizer.reducer for optimizer in self.optimizers]

    @property
    def step_number(self) -> int:
        """Number of optimizer steps so far."""
        return max((optimizer.num_steps for optimizer in self.optimizers), default=0)

    def replicas_wait(self, trains: bool) -> bool:
        """Return whether replicas wait for one another in each micro-batch: at experts, for gradients or parameters."""
        reduces = trains and any(reducer.reduces_each_pass for reducer in self.reducers)
        return reduces or bool(self.gathers) or self.mesh.size(EP) > 1

    def shard_parameters(self) -> None:
        """Have optimizers shard the parameters, which are then gathered while modules use them (ZeRO stage 3)."""
        for stage in self.runtime.stages:
            with self.runtime.viewing(stage):
                self.gathers.units.add(self.module)
        self.runtime.register_microbatch_hook(lambda index: self.gathers.release_all())

    def _draw_from_stream(self, this: Pass) -> AbstractContextManager[None]:
        if not self.training or this.generates:
            return nullcontext()
        return self.stream.active() if this.goes_back else self.stream.of_pass()  # its forward pass was one before

    def begin_training(
        self, batch: Mapping[str, Any], check: Callable[[Mapping[str, Any], HybridMesh], None] = check_batch
    ) -> None:
        """Check before a training pass what ranks must share.

        Args:
            check: compares the batch over ranks.
        """
        if self.checks_this_batch():
            check(batch, self.mesh)
        check_tied(self.tied, self.unwrap())

    @method_as_declared(lambda model: model.options.signature)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a batch; see `run_one_stage`, and `UserLoop` for a pipeline.

        It shows the signature of the wrapped model's forward.

        Raises:
            ConfigurationError: if another engine runs it, or a compiler traces it.
        """
        self.refuse_outer_engine()
        self.refuse_tracer()
        args, kwargs = self.options.by_name(args, kwargs)
        as_tuple = self.options.wants_tuple(kwargs)
        batch = Batch.of(self, kwargs, args)
        if self.mesh.size("pp") > 1 or self.units is not None:
            outputs = self.user_loop.forward(batch)
            return outputs.to_tuple() if as_tuple else outputs
        outputs = run_one_stage(self, batch)
        self.watch_gradients(outputs)
        return outputs.to_tuple() if as_tuple and hasattr(outputs, "to_tuple") else outputs

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients, of all optimizers and of parameters that no optimizer holds."""
        held = {param for each in self.optimizers for bucket in each.buckets for param in bucket.params}
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)
        for param in self.module.parameters():
            if param not in held and param.grad is not None:
                param.grad = None if set_to_none else torch.zeros_like(param.grad)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their global norm is at most `max_norm`; return the norm before (0-d).

        Must be called on all ranks between the backward pass and `step`. It replaces
        `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)` under any layout.

        Args:
            norm_type: the `p` of the p-norm, above 0; `inf` for the largest absolute value.

        Raises:
            ConfigurationError: if the model has no optimizer, or a norm is no number, or cannot be.
        """
        if not self.optimizers:
            raise ConfigurationError("model.clip_grad_norm_ finds no optimizer; give boost() the optimizer as well")
        return clip_grad_norm_(self.optimizers, max_norm, norm_type)

    def checks_this_batch(self) -> bool:
        """Count a training batch; return whether to compare it over ranks: the first few, and in debug mode all."""
        self.batches_seen += 1
        return self.batches_seen <= FIRST_STEPS or self.trace.watch is not None

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' `generate` on sharded weights; every rank of the pipeline and of its stages has all tokens.

        Sampling draws from torch's own random numbers, as they are on the first of these ranks.

        Raises:
            RuntimeError: if the layers of the model keep no cache.
            ConfigurationError: for what a pipeline cannot do, or ranks of one that do not ask for the same.
        """
        kwargs = self.on_device(kwargs)
        with in_pass(self, Pass(PassKind.GENERATE), [{} if self.options.rows_of(kwargs) == 0 else kwargs]):
            if self.mesh.size("pp") > 1:
                # Imported here: few jobs generate through a pipeline.
                from plugins.hybrid_parallel.boosted.stage_generation import generate_through_stages

                return generate_through_stages(self, args, kwargs)
            with failure.guard("model.generate", publishes=False):
                return self.module.generate(*args, **kwargs)

    @contextmanager
    def scoring_tokens(self, temperature: float, fields: tuple[str, ...]) -> Iterator[None]:
        """Let calls of the model return a dict of scores of the tokens in their `shift_labels`, without logits.

        Args:
            temperature: divides the logits.
            fields: see `shardformer.cross_entropy.vocab_parallel`.

        Raises:
            ConfigurationError: if the temperature is not above 0.
        """
        self.losses.scores = ScoresAsked(fields, temperature)
        try:
            yield
        finally:
            self.losses.scores = None

    def token_log_probs(self, batch: Mapping[str, Any], temperature: float = 1.0) -> TokenLogProbs:
        """Return the log-probability of each next token and the entropy of its prediction, differentiable.

        Logits exist for one chunk of tokens at a time, on the ranks that have their part of the vocabulary. All ranks
        call it, and `booster.backward` takes a loss of the result, under any layout.

        Args:
            batch: arguments of the model's forward. Scored are its `labels` that are not -100; without labels the
                tokens of `input_ids`, but for padding and the first of each packed document.
            temperature: divides the logits.

        Returns:
            [batch, seq - 1] each, the value at t of token t + 1; with `shift_labels` in the batch, and for models whose
            labels are not those of the next tokens, [batch, seq].

        Raises:
            ConfigurationError: if the temperature is not above 0, the batch has no tokens, or the model no logits.
        """
        given, are_next = next_tokens(batch, self.losses.head_loss)
        with self.scoring_tokens(temperature, TokenLogProbs._fields):
            scores = self(**given)
        return TokenLogProbs(*(scores[name][:, :-1] if are_next else scores[name] for name in TokenLogProbs._fields))

    def expert_load(self) -> dict[str, Tensor]:
        """Return how many tokens were sent to each expert for the last step of the optimizer; call it on all ranks.

        Needs the plugin's option `count_expert_load` or `moe_router_bias_update_rate`. Each choice of a token counts,
        padding does not. Before the first step there is no layer.

        Returns:
            Path of the experts of each layer -> counts over all ranks and passes of the step, [experts], int64, in host
            memory.

        Raises:
            ConfigurationError: if tokens are not counted.
        """
        if self.token_counts is None:
            raise ConfigurationError(
                "model.expert_load() finds no counts, because count_expert_load=False; use "
                "HybridParallelPlugin(count_expert_load=True)"
            )
        return self.token_counts()

    def on_device(self, batch: Mapping[str, Any], args: tuple = ()) -> dict[str, Any]:
        """Return a batch on this rank's device, each entry in its own dtype.

        Layers cast what they multiply from the first call on that has floating-point entries; texts have none.

        Args:
            args: positional arguments, which have no names.
        """
        if not self._layers_cast and has_floats((*args, *batch.values())):
            self._layers_cast, layers = True, dict.fromkeys(self.module.modules())
            for stage in self.runtime.stages:
                with self.runtime.viewing(stage):
                    layers |= dict.fromkeys(self.module.modules())
            cast_inputs(layers, self.module, self.options.dtype)
        if self.mesh.size("cp") > 1:  # each rank reads its own tokens of what it is given
            batch = {name: self._read_by_parts(value) for name, value in batch.items()}
        return to_device(batch, self.mesh.device)

    def _read_by_parts(self, entry: Any) -> Any:
        """Let the gradient of an entry of the script's own, such as embeddings, be that of whole sequences."""
        is_asked = isinstance(entry, Tensor) and entry.is_leaf and entry.requires_grad
        return copy_to_region(entry, self.mesh.group("cp")) if is_asked else entry

    def gathered(self, outputs: Any) -> Any:
        """Return `outputs` of whole sequences, with logits gathered over the vocabulary-parallel ranks."""
        return with_whole_logits(self.whole_sequences(outputs), self.module)

    def whole_sequences(self, outputs: Any) -> Any:
        """Gather outputs of this rank's part of each sequence to outputs of whole sequences."""
        return with_whole_sequences(outputs, self.losses.axis)


_log = get_logger(__name__)
_METHODS = ("save_pretrained", "push_to_hub")
# Arguments of `save_pretrained` that writing from all ranks knows; with others, rank 0 writes the gathered weights.
_STREAMED = frozenset(("is_main_process", "save_function", "max_shard_size", "safe_serialization", "state_dict"))
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "safetensors", "booster")
_STATE = "_state_of_rank"  # attribute of a module whose state dict is a part


def write_whole(model: GuardedModel) -> None:
    """Let the modules of a boosted model write whole weights, and mark their state dicts that are a part of them."""
    if (requests := failure.requests()) is not None:
        model.files.number = len(requests.answers)
        requests.answers.append(partial(_write_part, weakref.ref(model)))
    is_whole = model.is_whole  # looks at all parameters
    for path, module in model.module.named_modules():
        for method in filter(partial(hasattr, type(module)), _METHODS):
            vars(module)[method] = _WholeCall(model, module, path, method)
        if not is_whole and (path == "" or _is_cut(module)):
            if _STATE not in vars(module):
                module._register_state_dict_hook(_mark)
            vars(module)[_STATE] = _WholeCall(model, module, path, "state_dict")


def _write_part(model: weakref.ref[GuardedModel], directory: str) -> list[Any]:
    return model().files.io().write_part(model(), directory)


def _is_cut(module: nn.Module) -> bool:
    return any(isinstance(each, StagePlaceholder) for each in module.modules()) or any(
        spec_of(param).full_shape != tuple(param.shape) for param in module.parameters()
    )


def _mark(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> LocalState | None:
    return None if prefix else LocalState(state, vars(module)[_STATE].gathered)


class _WholeCall:
    """A method of a module of a boosted model, that works on whole weights.

    Args:
        module: the model inside it, or a module of that.
        path: name of the module there; empty for the model itself.
    """

    def __init__(self, model: GuardedModel, module: nn.Module, path: str, method: str) -> None:
        self.model, self.module, self.path, self.method = model, module, path, method

    def __deepcopy__(self, memo: dict[int, Any]) -> _WholeCall:
        return self  # the copy of the model replaces it by its own

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigurationError(
            "a model that boost() has sharded cannot be pickled; use model.save_pretrained(folder)"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method of the module's class; all ranks call it, unless each has, or is given, the whole weights.

        Raises:
            ConfigurationError: if `state_dict` is one rank's part, or the folder cannot be written; on all ranks.
        """
        plain = getattr(type(self.module), self.method).__get__(self.module)
        given = kwargs.get("state_dict")
        has_all = self.model.is_whole and not self.model.gathers
        if has_all or (given is not None and self._is_whole(given)):
            if has_all or not (isinstance(given, WholeState) and self._reads_stages()):
                return plain(*args, **kwargs)
            del kwargs["state_dict"]  # of the same weights
        if self.model.files.state is not None:  # called by push_to_hub
            return plain(*args, **kwargs | {"state_dict": self._of_module(self.model.files.state)})
        return self._save(plain, args, kwargs)

    def gathered(self) -> dict[str, Tensor]:
        """Return the whole state dict of the module, in host memory; all ranks call it, or rank 0 alone."""
        state = self._joined_alone("model")
        return dict(self._of_module(self.model.files.io().whole_state_dict(self.model)) if state is None else state)

    def _save(self, plain: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        options = inspect.signature(plain).bind(*args, **kwargs).arguments
        options |= options.pop("kwargs", {})
        state = self._joined_alone(str(options.get("save_directory", "model")))
        streams = self.method == "save_pretrained" and not self.path and self._may_stream(options)
        if self._reads_stages() and (state is not None or not streams):
            raise ConfigurationError(
                f"model.{self.method}() of peft writes the adapters of rank 0's modules, and other stages have theirs; "
                "call model.save_pretrained(folder) of the whole model on all ranks, and upload the folder"
            )
        if state is not None:
            return self._write(plain, args, kwargs, state)
        if streams:
            folder = all_gather_json(str(options["save_directory"]))[0]  # each rank may have made one of its own
            self.model.files.io().save_model(self.model, folder, _size(plain, options))
            return None
        state = self._of_module(self.model.files.io().whole_state_dict(self.model))
        return raise_on_all_ranks(lambda: self._write(plain, args, kwargs, state) if dist.get_rank() == 0 else None)

    def _joined_alone(self, folder: str) -> WholeState | None:
        """Return the module's whole state if rank 0 calls alone, from files of the others; None if all ranks call."""
        requests = failure.requests()
        if requests is None or requests.joins():
            return None
        aside = str(Path(f"{folder}-parts").resolve())
        _log.warning("rank 0 alone calls model.%s(); the other ranks write their parts to %s", self.method, aside)
        parts = requests.ask(self.model.files.number, aside)
        if problem := next((each["error"] for each in parts if isinstance(each, dict)), None):
            raise ConfigurationError(f"model.{self.method}() by rank 0 alone: {problem}; call it on all ranks")
        state = self.model.files.io().joined_parts(self.model, aside, parts)
        shutil.rmtree(aside, ignore_errors=True)
        return self._of_module(state)

    def _write(self, plain: Callable[..., Any], args: tuple, kwargs: dict[str, Any], state: WholeState) -> Any:
        if self.method == "save_pretrained":
            return plain(*args, **kwargs | {"state_dict": state})
        self.model.files.state = state
        try:
            return plain(*args, **kwargs)
        finally:
            self.model.files.state = None

    def _reads_stages(self) -> bool:
        """Return whether the method looks for adapters of peft among modules, of which each stage has its own."""
        is_adapted = is_a(self.module, "model") or bool(getattr(self.module, "modules_to_save", None))
        return self.model.mesh.size("pp") > 1 and is_adapted

    def _may_stream(self, options: Mapping[str, Any]) -> bool:
        function = options.get("save_function")
        kinds = (plain.__module__ for plain in (getattr(type(self.module), self.method), function) if plain is not None)
        return (
            set(options) - {"save_directory"} <= _STREAMED
            and options.get("safe_serialization", True)
            and all((kind or "").partition(".")[0] in _LIBRARIES for kind in kinds)
        )

    def _is_whole(self, state: Mapping[str, Any]) -> bool:
        """Return whether a state dict has whole tensors, of the script's own making too; refuse one rank's part."""
        if isinstance(state, WholeState) or not state:
            return True
        own = dict(self.module.named_parameters(remove_duplicate=False))
        shapes = {name: spec_of(param).full_shape for name, param in own.items()}
        cut = any(tuple(value.shape) != shapes.get(name, tuple(value.shape)) for name, value in state.items())
        has_stage = self.model.mesh.size("pp") > 1 and set(state) <= set(self.module.state_dict())
        if cut or has_stage or isinstance(state, LocalState):
            raise ConfigurationError(
                f"model.{self.method}() got a state_dict that is this rank's part of the model alone; leave it out, on "
                "all ranks, or give state_dict=accelerator.get_state_dict(model)"
            )
        return True

    def _of_module(self, state: Mapping[str, Tensor]) -> WholeState:
        start = f"{self.path}." if self.path else ""
        return WholeState({name.removeprefix(start): each for name, each in state.items() if name.startswith(start)})


def _size(plain: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """Return the largest size of a file, which transformers gives in bytes or as a string."""
    size = options.get("max_shard_size")
    if size is None:
        with suppress(KeyError):
            size = inspect.signature(plain).parameters["max_shard_size"].default
    return f"{size / 1e3:f}KB" if isinstance(size, int) else size or "50GB"
