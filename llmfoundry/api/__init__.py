"""The functions behind `import llmfoundry` and behind the scripts, which both call them.

Before PyTorch is imported, its allocator is set as scripts set it.
"""

import os

from llmfoundry.processes import allocator_settings
from llmfoundry.terminal import quiet_torchao

os.environ.update(allocator_settings(os.environ))
quiet_torchao()
