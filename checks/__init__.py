"""The built-in checks, one file each, imported as `nccl_doctor.checks`.

The registry finds every module in this folder: a new check is one new file.
"""

if __name__ != "nccl_doctor.checks":
    raise ImportError("import nccl_doctor.checks, not checks: the folder ships as that package")
