"""The engine: token ids in, token ids out.

A waiting thread of torch's OpenMP pool burns its core by default. The event loop and the tools work on the same cores,
and while they do, a product of a few rows was seen to take 24 ms instead of 0.06. So waiting threads sleep, unless the
user says otherwise. OpenMP looks at the setting once, when torch is loaded, hence here.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
