"""A job as a TOML file beside the files that it names: what `gradbox submit` reads.

    computation     the file as a whole: which keys there are, and what each holds
    values          what a key may hold: tensors, shards, losses, functions
    files           .safetensors, .npy and file.py:function, read from where the job file lies

Every error begins with the path of its key: `loss_inputs.labels: expected …, got …`.
"""

from gradbox.cli.job_file.computation import read_job

__all__ = ["read_job"]
