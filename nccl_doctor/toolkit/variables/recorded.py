"""Environment variables that may be recorded: an allow-list of names, never a full dump.

What is not about the launch, the network or the GPU stays out of facts, reports and support
tickets. A launcher's prefix proves nothing: Slurm puts a token (SLURM_JWT), the user's variables
(SLURM_EXPORT_ENV) and options of plug-ins (SLURM_SPANK_*) beside the number of the job, Open MPI
the command line (OMPI_ARGV). So launchers have names here; families are only what one library
reads as switches, numbers, devices and paths. Of a name in a family that no table knows, only that
it is set is recorded: NCCL_PW is anybody's. Secrets in values are masked all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from nccl_doctor.system.masking import masked_variable
from nccl_doctor.toolkit.variables.table import table

SET = "(set)"
"""Stands for a value that is never recorded."""
FAMILIES: Mapping[str, str] = {
    "NCCL_": "NCCL and its plug-ins: switches, numbers, devices, addresses; NCCL has no log-in",
    "GLOO_": "gloo: interface, transport, log level; of TLS only where the files are",
    "TORCH_NCCL_": "torch's use of NCCL: time-outs and switches",
    "TORCH_NCCL2_": "torch's process group nccl2: switches",
    "TORCH_FR_": "torch's flight recorder: sizes, switches, the file of its dump",
    "TORCH_DIST_": "torch.distributed: switches",
    "TORCH_DISTRIBUTED_": "torch.distributed: switches, level of its checks",
    "TORCH_ELASTIC_": "torchrun's agent: time-outs and switches",
    "TORCH_WATCHDOG_": "torch's watchdog of process groups in Python: intervals, what it does",
    "TORCH_SYMM": "torch's symmetric memory: which library, switches",
    "TORCH_GLOO_": "torch's use of gloo: switches",
    "UCX_": "UCX: transports, devices, sizes, time-outs; it has no log-in",
    "FI_EFA_": "libfabric's provider for EFA: switches and sizes",
    "FI_CXI_": "libfabric's provider for Slingshot: switches and sizes",
    "FI_HMEM_": "libfabric's use of GPU memory: switches",
    "FI_LOG_": "what libfabric logs",
    "FI_MR_": "libfabric's cache of memory regions",
    "FI_OFI_RXM_": "libfabric's reliable datagrams: sizes",
    "FI_OPX_": "libfabric's provider for Omni-Path: switches and sizes",
    "FI_SHM_": "libfabric's provider for shared memory: switches and sizes",
    "FI_TCP_": "libfabric's provider for TCP: interface, ports, sizes",
    "FI_VERBS_": "libfabric's provider for verbs: device, sizes",
}
"""Prefix → what reads every name under it, and why none is a secret."""


def _under(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in names.split())


NAMES = frozenset(
    {
        "LD_LIBRARY_PATH",
        # Who am I in the job, in the words of every launcher.
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "NNODES", "CROSS_RANK", "CROSS_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        *("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", "PRTE_LAUNCHED", "NPROC_PER_NODE", "NUM_NODES"),
        *_under("MV2_COMM_WORLD_", "RANK SIZE LOCAL_RANK LOCAL_SIZE"),
        *_under("PALS_", "RANKID LOCAL_RANKID LOCAL_SIZE NODEID"),
        *_under("FLUX_", "TASK_RANK TASK_LOCAL_ID JOB_SIZE JOB_NNODES JOB_ID"),
        *_under("JSM_NAMESPACE_", "RANK SIZE LOCAL_RANK LOCAL_SIZE"),
        *_under("HOROVOD_", "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE"),
        *_under("SUBMITIT_LOCAL_", "GLOBALID NTASKS LOCALID NODEID JOB_NUM_NODES JOB_ID"),
        *("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_NODE_RANK"),
        *("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS", "PBS_JOBID", "LSB_JOBID"),
        *("AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX", "JOB_COMPLETION_INDEX"),
        # torchrun's options.
        *_under(
            "PET_",
            "NNODES NPROC_PER_NODE NODE_RANK MASTER_ADDR MASTER_PORT LOCAL_ADDR STANDALONE "
            "RDZV_BACKEND RDZV_ENDPOINT RDZV_ID RDZV_CONF MAX_RESTARTS MONITOR_INTERVAL "
            "START_METHOD ROLE NO_PYTHON RUN_PATH LOG_DIR REDIRECTS TEE LOCAL_RANKS_FILTER "
            "EVENT_LOG_HANDLER LOGS_SPECS NUMA_BINDING SIGNALS_TO_HANDLE",
        ),
        # The job and its shape, as sbatch(1) and srun(1) name them.
        *_under(
            "SLURM_",
            "JOB_ID JOBID JOB_NAME JOB_NODELIST NODELIST JOB_NUM_NODES NNODES JOB_PARTITION "
            "JOB_QOS JOB_RESERVATION JOB_LICENSES JOB_CPUS_PER_NODE JOB_GPUS JOB_START_TIME "
            "JOB_END_TIME JOB_SEGMENT_SIZE "
            "STEP_ID STEPID STEP_NODELIST STEP_NUM_NODES STEP_NUM_TASKS STEP_TASKS_PER_NODE "
            "STEP_GPUS STEP_LAUNCHER_PORT STEP_RESV_PORTS "
            "NTASKS NPROCS NTASKS_PER_NODE NTASKS_PER_CORE NTASKS_PER_SOCKET NTASKS_PER_GPU "
            "TASKS_PER_NODE PROCID LOCALID NODEID TASK_PID RESTART_COUNT DISTRIBUTION "
            "CPUS_ON_NODE CPUS_PER_TASK CPUS_PER_GPU CPU_BIND CPU_BIND_TYPE CPU_BIND_LIST "
            "CPU_BIND_VERBOSE THREADS_PER_CORE CORE_SPEC "
            "GPUS GPUS_ON_NODE GPUS_PER_NODE GPUS_PER_TASK GPUS_PER_SOCKET GPU_BIND GPU_FREQ "
            "MEM_PER_NODE MEM_PER_CPU MEM_PER_GPU MEM_BIND MEM_BIND_TYPE MEM_BIND_LIST "
            "MEM_BIND_VERBOSE MEM_BIND_PREFER MEM_BIND_SORT "
            "ARRAY_JOB_ID ARRAY_TASK_ID ARRAY_TASK_COUNT ARRAY_TASK_MIN ARRAY_TASK_MAX "
            "ARRAY_TASK_STEP HET_SIZE "
            "CLUSTER_NAME WORKING_CLUSTER NODENAME NODE_ALIASES TOPOLOGY_ADDR "
            "TOPOLOGY_ADDR_PATTERN LAUNCH_NODE_IPADDR SUBMIT_HOST SUBMIT_DIR SRUN_COMM_HOST "
            "SRUN_COMM_PORT GTIDS MPI_TYPE NETWORK PRIO_PROCESS OVERCOMMIT OVERSUBSCRIBE "
            "UMASK VERSION CONF CONTAINER",
        ),
        # Open MPI: how large, which transports, which interfaces.
        *_under("OMPI_COMM_WORLD_", "RANK SIZE LOCAL_RANK LOCAL_SIZE NODE_RANK"),
        *_under("OMPI_", "UNIVERSE_SIZE NUM_APP_CTX APP_CTX_NUM_PROCS FIRST_RANKS VERSION"),
        *_under(
            "OMPI_MCA_",
            "btl pml mtl osc coll btl_base_verbose pml_base_verbose btl_tcp_if_include "
            "btl_tcp_if_exclude oob_tcp_if_include oob_tcp_if_exclude btl_openib_allow_ib "
            "btl_openib_if_include btl_openib_warn_default_gid_prefix "
            "btl_vader_single_copy_mechanism btl_smcuda_use_cuda_ipc coll_hcoll_enable "
            "opal_cuda_support opal_common_ucx_tls opal_common_ucx_devices pml_ucx_tls "
            "pml_ucx_devices ess_base_jobid ess_base_vpid orte_hnp_uri orte_node_regex "
            "orte_num_nodes orte_num_restarts orte_app_num orte_bound_at_launch "
            "orte_ess_node_rank orte_ess_num_procs hwloc_base_binding_policy "
            "rmaps_base_mapping_policy rmaps_ppr_n_pernode",
        ),
        # What CUDA and its libraries read (CUDA programming guide, environment variables).
        *_under(
            "CUDA_",
            "VISIBLE_DEVICES DEVICE_ORDER DEVICE_MAX_CONNECTIONS LAUNCH_BLOCKING MODULE_LOADING "
            "MODULE_DATA_LOADING HOME PATH VERSION CACHE_DISABLE CACHE_PATH CACHE_MAXSIZE "
            "DISABLE_PTX_JIT FORCE_PTX_JIT DISABLE_JIT FORCE_JIT AUTO_BOOST "
            "MANAGED_FORCE_DEVICE_ALLOC ENABLE_COREDUMP_ON_EXCEPTION COREDUMP_FILE "
            "DEVICE_WAITS_ON_EXCEPTION DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT "
            "SCALE_LAUNCH_QUEUES GRAPHS_USE_NODE_PRIORITY DEVICE_MAX_COPY_CONNECTIONS LOG_FILE "
            "MPS_PIPE_DIRECTORY MPS_LOG_DIRECTORY MPS_ACTIVE_THREAD_PERCENTAGE "
            "MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING MPS_PINNED_DEVICE_MEM_LIMIT "
            "ENABLE_USER_TRIGGERED_COREDUMP DISABLE_PERF_BOOST",
        ),
        *_under(
            "TORCH_",
            "CPP_LOG_LEVEL SHOW_CPP_STACKTRACES DISABLE_SHARE_RDZV_TCP_STORE LOGS HOME "
            "CUDA_ARCH_LIST ALLOW_TF32_CUBLAS_OVERRIDE USE_CUDA_DSA DEVICE_BACKEND_AUTOLOAD",
        ),
        *_under("FI_", "PROVIDER PROVIDER_PATH UNIVERSE_SIZE FORK_UNSAFE IFACE HOOK AV_REMOVE"),
    }
)
_FAMILY = re.compile(rf"(?:{'|'.join(FAMILIES)})\w+")


def allowed(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be recorded, by name, with the secrets in their values masked; `SET`
    in the place of the value where nobody knows what it is.
    """
    return {
        name: masked_variable(name, value) if name in NAMES or _is_known(name) else SET
        for name, value in sorted(environ.items())
        if name in NAMES or _FAMILY.fullmatch(name)
    }


def _is_known(name: str) -> bool:
    """True if the table says what reads a variable, or what it is of: a plug-in, a build."""
    known = table()
    library = known.library_of(name)
    return name in known.variables or (library is not None and library.ignores(name))
