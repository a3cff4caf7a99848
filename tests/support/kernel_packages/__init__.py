"""Stand-ins for packages of kernels that no test machine has, with their signatures; they compute by plain torch.

`from kernel_packages import flash_attn` puts them on the path: then `import flash_attn` finds it elsewhere, too.
Their operators have the names of the real ones, and run on CPUs in any dtype. On pretended cards they refuse float32.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

if (PLACE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(PLACE)

import flash_attn as flash_attn
import flash_attn.cute  # noqa: F401
import flash_attn_interface as flash_attn_interface
import liger_kernel.transformers as liger  # noqa: F401
import xformers.ops as xformers_ops  # noqa: F401


@contextmanager
def usable_in_transformers() -> Iterator[None]:
    """A region in which transformers finds the stand-ins of flash-attn 2, 3 and 4, and takes them on CPUs."""
    from transformers import modeling_flash_attention_utils as utils
    from transformers import modeling_utils

    with ExitStack() as stack:
        for version in (2, 3, 4):
            stack.enter_context(patch.object(utils, f"is_flash_attn_{version}_available", lambda: True))
        can_dispatch = lambda self, **which: True  # noqa: E731
        stack.enter_context(patch.object(modeling_utils.PreTrainedModel, "_flash_attn_can_dispatch", can_dispatch))
        yield
