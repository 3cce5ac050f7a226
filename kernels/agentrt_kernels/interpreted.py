"""Triton's interpreter, which runs kernels without a GPU (`TRITON_INTERPRET=1`), kept working with today's numpy."""

from typing import Any

from triton.runtime import interpreter


def repair() -> None:
    """Triton 3.6 takes `int` of an array of one element where a loop's bounds are a kernel's; numpy 2.4 refuses that."""
    patch_tensor = interpreter._patch_lang_tensor
    if patch_tensor.__module__ == __name__:
        return

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
