"""Booster: hybrid-parallel training of Hugging Face models behind one call."""

from booster import plugin
from booster.booster import Booster
from booster.errors import ConfigurationError, VerificationError
from booster.extensions import auto_accelerate, verify, warn_of_hidden_plugins
from booster.launch import launch, launch_from_torch
from booster.logging import lower_missing_kernel
from booster.meter import Meter
from booster.notebook import notebook_launcher
from booster.plugin import CheckpointIO, PipelineResult, Plugin, TrainingObjects, available_plugins, load_plugin
from booster.wrappers import ModelWrapper, OptimizerWrapper
from shardformer.lazy import LazyInitContext, record_module_init

__version__ = "0.1.0"
__getattr__ = plugin.__getattr__  # says where plugins are
warn_of_hidden_plugins()
lower_missing_kernel()

__all__ = [
    "Booster",
    "CheckpointIO",
    "ConfigurationError",
    "LazyInitContext",
    "Meter",
    "ModelWrapper",
    "OptimizerWrapper",
    "PipelineResult",
    "Plugin",
    "TrainingObjects",
    "VerificationError",
    "auto_accelerate",
    "available_plugins",
    "launch",
    "launch_from_torch",
    "load_plugin",
    "notebook_launcher",
    "record_module_init",
    "verify",
]
