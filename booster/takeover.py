"""An unmodified script under a layout: what it makes of transformers, TRL, accelerate and Lightning is boosted.

`booster run --layout` and the variable `BOOSTER_LAYOUT` ask for it. `install` runs when the interpreter starts, before
the script's first line, and imports nothing. When the script has imported one of these libraries, making an object of
its class makes one of the boosted class, which derives from it. The names stay what they are, so that the script's own
subclasses, `isinstance` and pickles find what they know.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "BOOSTER_LAYOUT"
_LENGTH = 2048  # tokens of a sample that the planner assumes, if the model takes as many
_JOIN_S = 30.0  # within which all ranks are refused
_STATES = "booster/random states of rank 0"
# Module -> the class in it that is taken over.
_CLASSES = {
    "transformers.training_args": "TrainingArguments",
    "transformers.trainer": "Trainer",
    "accelerate.accelerator": "Accelerator",
    "lightning.pytorch.trainer.trainer": "Trainer",
    "lightning.fabric.fabric": "Fabric",
    "pytorch_lightning.trainer.trainer": "Trainer",
    "lightning_fabric.fabric": "Fabric",
}
_STEPS, _LOADERS = "torch.optim.optimizer", "accelerate.data_loader"


def install() -> None:
    """Take over what the script imports, if a layout is given, once; processes that it starts are no ranks."""
    layout = os.environ.pop(VARIABLE, None) if "RANK" in os.environ else os.environ.get(VARIABLE)
    present = next((each for each in sys.meta_path if isinstance(each, Takeover)), None)
    if layout is None or (present is not None and present.layout == layout):
        return
    if present is not None:
        raise present._refusal(
            f"{VARIABLE}={layout} is a second layout of a process that runs under {present.layout}; leave one of them "
            "out"
        )
    sys.meta_path.insert(0, Takeover(layout))


class AfterImport(MetaPathFinder):
    """Finds no modules itself, and changes some that others find."""

    def __init__(self, names: Sequence[str], act: Callable[[ModuleType], None]) -> None:
        self.names, self.act = names, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that other finders have for a module that is changed; None for others."""
        if fullname not in self.names:
            return None
        finders = (each for each in sys.meta_path if each is not self and hasattr(each, "find_spec"))
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in finders)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.act(module)

            spec.loader.exec_module = exec_module
        return spec


class Takeover(AfterImport):
    """Takes over what a script imports.

    Args:
        layout: a JSON file, or options as text, of the plugin.

    Attributes:
        used: the first class of which the script has made a boosted object; empty before.
    """

    def __init__(self, layout: str) -> None:
        super().__init__((*_CLASSES, _STEPS, _LOADERS), self._take)
        self.layout, self.used = layout, ""
        self._is_planned = layout.startswith("auto")
        self._is_paused = self._has_joined = False
        self._plugin = None
        self._classes: dict[str, type] = {}
        self._boosted: dict[type, type] = {}
        atexit.register(self._at_exit)

    def _take(self, module: ModuleType) -> None:
        name = module.__name__
        if name == _STEPS:
            module.register_optimizer_step_pre_hook(self._check_step)
            return
        if name == _LOADERS:
            self._skip_batches(module)
            return
        known = self._classes[name] = getattr(module, _CLASSES[name])
        if "RANK" in os.environ:  # and not in a launcher, which may import the same
            self._check_layout()
        if known.__module__ != name:
            raise self._refusal(
                f"{name}.{known.__name__} is {known.__module__}.{known.__qualname__} in this process, which {VARIABLE}="
                f"{self.layout} cannot boost; leave out what replaces it"
            )
        if name == "transformers.training_args":
            self._count_replicas(known)
        elif name == "transformers.trainer":
            self._make_by(known, self._trainer_class)
        elif name == "accelerate.accelerator":
            self._make_by(known, self._accelerator_class)
        else:
            self._give_strategy(known)

    # ----- the layout -----

    def _check_layout(self) -> None:
        """Refuse a layout that is invalid or does not fit the ranks, on all of them and in one line."""
        from booster import ConfigurationError
        from booster.plugin import plugin_class

        try:
            plugin_class().check_config(self.layout, int(os.environ.get("WORLD_SIZE", "1")))
        except ConfigurationError as error:
            raise self._refusal(str(error)) from None

    def _join(self) -> None:
        """Join the job; the first time, with rank 0's random numbers, which split data the same on all ranks."""
        _join()
        if not self._has_joined:
            self._has_joined = True
            _share_random_states()

    def _use(self, given: type, model: Any = None, args: Any = None) -> Any:
        """Return the plugin for a class of the script; say once what is used; `model`, `args`: of a Trainer."""
        import torch.distributed as dist

        from booster import ConfigurationError
        from booster.plugin import plugin_class

        if not self.used:
            name = f"{given.__module__.partition('.')[0]}.{given.__qualname__}"
            if not self._is_planned:
                self._plugin = self._plugin or plugin_class().from_config(self.layout)
            elif not hasattr(model, "config"):
                raise ConfigurationError(
                    f"{VARIABLE}={self.layout} plans for the model that a Trainer is given, and {name} is given none; "
                    "use what `booster plan MODEL --output layout.json` finds"
                )
            else:
                self._plugin = plugin_class().planned(self.layout, model, *_sizes_of(model, args))
            self.used = name
            if dist.get_rank() == 0:
                sys.stderr.write(f"note: {name} is boosted: {self._plugin.layout} ({VARIABLE}={self.layout})\n")
        return self._plugin

    # ----- what is boosted -----

    def _count_replicas(self, known: type) -> None:
        """Have a Trainer's `world_size` count replicas before there is a Trainer; processes stay ranks."""
        finish, first = known.__post_init__, known.main_process_first

        def count() -> int:
            from booster.plugin import plugin_class

            self._plugin = self._plugin or plugin_class().from_config(self.layout)
            return self._plugin.dp_size

        @wraps(finish)
        def __post_init__(args: Any) -> None:  # noqa: N807
            import torch

            from booster.integrations.trainer_accelerator import CountedReplicas

            if "RANK" in os.environ and not torch.cuda.is_available():
                os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else one process is counted on CPUs
            finish(args)
            if "RANK" in os.environ and not self._is_planned:
                self._join()
                args.distributed_state = CountedReplicas(count)

        @wraps(first)
        @contextmanager
        def main_process_first(args: Any, *further: Any, **options: Any) -> Iterator[None]:
            from accelerate.state import PartialState

            with ExitStack() as stack:
                counted, args.distributed_state = args.distributed_state, PartialState()
                stack.enter_context(first(args, *further, **options))
                args.distributed_state = counted
                yield

        known.__post_init__, known.main_process_first = __post_init__, main_process_first

    def _make_by(self, known: type, derive: Callable[[type], type]) -> None:
        """Have objects of a class, and of classes that derive from it, made of what `derive` returns for theirs."""

        def __new__(given: type, *args: Any, **options: Any) -> Any:  # noqa: N807
            made = given
            if not self._is_paused and given not in self._boosted.values():
                if given not in self._boosted:
                    self._boosted[given] = derive(given)
                made = self._boosted[given]
            return super(known, made).__new__(made)

        known.__new__ = __new__

    def _trainer_class(self, given: type) -> type:
        """Return the class of which an object is made where the script asks for a Trainer."""
        from booster.integrations.transformers import BoostedTrainer, boosted

        self._join()  # what cannot be boosted is said once
        takeover = self

        class TakenOver:
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                model = kwargs.get("model", args[0] if args else None)
                sizes = (each for each in (*args, *kwargs.values()) if hasattr(each, "per_device_train_batch_size"))
                super().__init__(*args, plugin=takeover._use(given, model, next(sizes, None)), **kwargs)

            def create_accelerator_and_postprocess(self) -> None:
                with takeover._paused():
                    super().create_accelerator_and_postprocess()

        self._refuse_own(given, BoostedTrainer)
        return _named_as(given, (TakenOver, boosted(given)))

    def _accelerator_class(self, given: type) -> type:
        """Return the class of which an object is made where the script asks for an Accelerator."""
        import inspect

        from booster.integrations.accelerate import Accelerator

        self._join()
        takeover, native = self, self._classes["accelerate.accelerator"]
        names = list(inspect.signature(native.__init__).parameters)[1:]

        class TakenOver(Accelerator):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(takeover._use(given), **dict(zip(names, args, strict=False)), **options)
                self.state = _counting_replicas(self.state, self)

        self._refuse_own(given, Accelerator)
        return _named_as(given, (TakenOver,) if given is native else (given, TakenOver))

    def _skip_batches(self, module: ModuleType) -> None:
        """Have accelerate's `skip_first_batches` know boosted loaders."""
        rebuild = module.skip_first_batches

        @wraps(rebuild)
        def skip_first_batches(*args: Any, **options: Any) -> Any:
            from booster.integrations.prepared_loader import skipping

            return skipping(rebuild)(*args, **options)

        module.skip_first_batches = skip_first_batches

    def _give_strategy(self, given: type) -> None:
        """Have Lightning's Trainer or Fabric made with our strategy."""
        make = given.__init__

        @wraps(make)
        def __init__(this: Any, *args: Any, **options: Any) -> None:  # noqa: N807
            from booster import ConfigurationError

            self._join()
            name, strategy = f"{given.__module__.partition('.')[0]}.{given.__name__}", options.get("strategy", "auto")
            if not name.startswith("lightning."):
                raise ConfigurationError(
                    f"{VARIABLE}={self.layout} boosts lightning.{given.__name__}, and this script makes {name}; import "
                    "it from the package lightning"
                )
            if strategy != "auto":
                strategy = strategy if isinstance(strategy, str) else type(strategy).__name__
                raise ConfigurationError(
                    f"{VARIABLE}={self.layout} is the strategy of this job, and the script asks for {name}(strategy="
                    f"{strategy!r}); leave one of them out"
                )
            plugin = self._use(type(this))
            from booster.integrations.lightning import HybridParallelStrategy

            make(this, *args, **options | {"strategy": HybridParallelStrategy(plugin=plugin)})

        given.__init__ = __init__

    def _refuse_own(self, given: type, boosted: type) -> None:
        """Refuse a class that the script has boosted itself, with a plugin of its own."""
        from booster import ConfigurationError

        if issubclass(given, boosted):
            raise ConfigurationError(
                f"{VARIABLE}={self.layout} gives a layout to a script that gives a plugin to {given.__name__}; leave "
                "one of them out"
            )

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Have a boosted Trainer make its own Accelerator."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    # ----- scripts that are not taken over -----

    def _check_step(self, optimizer: Any, *further: Any) -> None:
        """Refuse the first step of an optimizer in a process that has boosted nothing."""
        if self.used:
            return
        raise self._refusal(
            f"{VARIABLE}={self.layout} boosts scripts of transformers' Trainer, TRL, accelerate and Lightning, and "
            f"this script steps an optimizer ({type(optimizer).__name__}) {self._why()}; leave the layout out, or "
            "write the lines of the README: booster.boost and booster.backward"
        )

    def _why(self) -> str:
        """Return why the optimizer belongs to nothing that is boosted, as far as one can tell."""
        import torch.distributed as dist

        for name, attribute in _CLASSES.items():
            for place in (name, name.partition(".")[0]):
                found = vars(sys.modules[place]).get(attribute) if name in self._classes else None
                if found is not None and not issubclass(found, self._classes[name]):
                    return f"after {place}.{attribute} was replaced by {found.__module__}.{found.__qualname__}"
        return "in a loop of its own" + (" with a process group of its own" if dist.is_initialized() else "")

    def _refusal(self, sentence: str) -> Exception:
        """Return the error of a sentence that all ranks say, which then is printed once."""
        from booster import ConfigurationError

        if "RANK" in os.environ:
            with suppress(Exception):  # ranks that go another way
                _join(timeout_s=_JOIN_S)
        return ConfigurationError(sentence)

    def _at_exit(self) -> None:
        """Say that a script which ended well was not taken over."""
        if os.environ.get("RANK") == "0" and not self.used and not hasattr(sys, "last_value"):
            sys.stderr.write(
                f"note: {VARIABLE}={self.layout} was not used: the script made no Trainer of transformers or TRL, no "
                "Accelerator, and no Trainer or Fabric of Lightning\n"
            )


def _join(**options: Any) -> None:
    """Join the job, whose ranks end with the exit code of a mistake in the command line if the layout does not fit."""
    from booster import launch_from_torch
    from booster.failure.diagnosis import LAYOUT_VARIABLE

    os.environ[LAYOUT_VARIABLE] = "1"
    launch_from_torch(seed=None, **options)


def _share_random_states() -> None:
    """Give the default generators of torch, Python and numpy the states that they have on rank 0."""
    import json
    import random

    import numpy
    import torch
    import torch.distributed as dist

    from booster.launch import job_store

    if dist.get_rank() == 0:
        kind, words, *rest = numpy.random.get_state()
        states = [torch.get_rng_state().tolist(), random.getstate(), [kind, words.tolist(), *rest]]
        job_store().set(_STATES, json.dumps(states))
    of_torch, (version, words, gauss), of_numpy = json.loads(job_store().get(_STATES))
    torch.set_rng_state(torch.tensor(of_torch, dtype=torch.uint8))
    random.setstate((version, tuple(words), gauss))
    numpy.random.set_state(tuple(of_numpy))


def _counting_replicas(state: Any, accelerator: Any) -> Any:
    """Return accelerate's state of the job, in which a process is a replica, as a script without a layout expects."""
    counts = {name: property(lambda _, n=name: getattr(accelerator, n)) for name in ("num_processes", "process_index")}
    made = object.__new__(type(type(state).__name__, (type(state),), counts))
    made.__dict__ = state.__dict__  # which all of accelerate shares
    return made


def _sizes_of(model: Any, args: Any) -> tuple[int, int]:
    """Return the samples of a step of one rank, and the tokens of a sample, as far as arguments of a Trainer tell."""
    rows = 8 if args is None else args.per_device_train_batch_size * args.gradient_accumulation_steps
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _LENGTH
    return rows, getattr(args, "max_length", None) or min(longest, _LENGTH)


def _named_as(given: type, bases: tuple[type, ...]) -> type:
    """Return a class of these bases that appears as `given`, also in messages and pickles."""

    def __reduce_ex__(self: Any, protocol: int) -> tuple:  # noqa: N807
        make, (_, *args), *state = object.__reduce_ex__(self, protocol)
        return make, (given, *args), *state

    names = {name: getattr(given, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(given)(given.__name__, bases, names | {"__reduce_ex__": __reduce_ex__})
