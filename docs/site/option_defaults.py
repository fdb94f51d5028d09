"""Extension of griffe, which reads the code for the reference: an option shows its default without its rule."""

from __future__ import annotations

from griffe import Attribute, ExprCall, Extension


class OptionDefaults(Extension):
    """Shows `tp_size: int = option(1, COUNT)` as `tp_size: int = 1`."""

    def on_attribute_instance(self, *, attr: Attribute, **_: object) -> None:
        """Replace a call of `option` by its first argument, the default."""
        if isinstance(attr.value, ExprCall) and str(attr.value.function) == "option":
            attr.value = attr.value.arguments[0]
