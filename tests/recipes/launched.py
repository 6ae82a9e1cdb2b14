"""What a process sees that a launch file started; prints one JSON line per process.

accelerate launch --config_file recipes/launch/X.yaml -m tests.recipes.launched [cpu]
"""

import json
import os
import sys

from accelerate import Accelerator

from training.engines import wants_fsdp


def main() -> None:
    accelerator = Accelerator(cpu="cpu" in sys.argv[1:])
    plugin = (
        accelerator.state.deepspeed_plugin if accelerator.distributed_type == "DEEPSPEED" else None
    )
    line = {
        "type": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "rank": accelerator.process_index,
        "fsdp": wants_fsdp(accelerator),
        "fsdp_version": os.environ.get("FSDP_VERSION"),
        "empty_targets": os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING"),
        "zero": plugin.deepspeed_config if plugin else None,
    }
    sys.stdout.write("\n" + json.dumps(line, default=str) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
