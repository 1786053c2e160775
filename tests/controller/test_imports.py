"""The controller's process imports neither torch nor vLLM."""

import subprocess
import sys


def test_the_controller_stays_light():
    code = (
        "import sys, app.controller.deployment, app.main\n"
        "heavy = [name for name in ('torch', 'vllm', 'transformers', 'pynvml') if name in sys.modules]\n"
        "sys.exit(', '.join(heavy) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
