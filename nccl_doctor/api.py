"""All that a check may import.

A check is a class with two methods and a few constants, in one file of `checks/` or of a plug-in:

* `observe(ctx)` looks at the system and returns JSON-able facts. It runs in a child process with a
  deadline; whatever it does, it cannot hurt the run.
* `judge(cluster)` is a pure function from everybody's facts to findings.
* `figures(cluster)`, if it likes: what is worth comparing with other runs; pure as well.
* `plan(cluster)`, only for checks that observe *together*: which participants meet in which round.

What is unexpected is left to the engine: an exception in `observe` or `judge` makes the check
`unknown`, never `pass`.
"""

from __future__ import annotations

from nccl_doctor.model.check import Check, Context, Peers, Skip, Untested
from nccl_doctor.model.cluster import ALONE, Cluster, Evidence, Host, Outcome, OutcomeStatus, Rank
from nccl_doctor.model.findings import (
    Confidence,
    Figure,
    Finding,
    Kind,
    Layer,
    Level,
    Round,
    Scope,
    Severity,
    Where,
    number_range,
)
from nccl_doctor.model.job import Job
from nccl_doctor.model.launch import Launch, LaunchProblem
from nccl_doctor.tools.binding.deepspeed import IMPORT as IMPORT_DEEPSPEED
from nccl_doctor.tools.binding.deepspeed import (
    accelerator_of,
    hand_over,
    import_deepspeed,
    init_by_deepspeed,
)
from nccl_doctor.tools.binding.judging import blame_binding, judge_binding
from nccl_doctor.tools.blame import Cause, LinkBlame, Odd, blame_links, odd_ones_out
from nccl_doctor.tools.claims import claimed_ranks, stands_for
from nccl_doctor.tools.deepspeed.host import gather_deepspeed
from nccl_doctor.tools.deepspeed.judging import judge_deepspeed
from nccl_doctor.tools.fabric.between import copies_arrive, joined_by_pcie
from nccl_doctor.tools.fabric.counters import counters_full, counters_risen, error_counters
from nccl_doctor.tools.fabric.direct import (
    gpu_direct_road,
    read_gpu_direct,
    redirecting_bridges,
    translating,
    unread_bridges,
)
from nccl_doctor.tools.fabric.down import PortDown, ports_down, seen_by_rdma
from nccl_doctor.tools.fabric.gids import (
    GID_SETTINGS,
    SEARCHES_SINCE,
    GidKind,
    PickedGid,
    fixed_index,
    gid_kind,
    gid_tables,
    pick_gid,
    wanted_kind,
)
from nccl_doctor.tools.fabric.hca import HCA, HcaList, rdma_admits, rdma_off
from nccl_doctor.tools.fabric.lists import as_ranks_want, lists_of_ranks
from nccl_doctor.tools.fabric.picks import table_of_picks
from nccl_doctor.tools.fabric.ports import rdma_devices, rdma_ports, speaks_verbs
from nccl_doctor.tools.fabric.railcalls import (
    RailCall,
    RailEnd,
    call_rails,
    rails_to_call,
    read_rail_calls,
)
from nccl_doctor.tools.fabric.rails import rails_of
from nccl_doctor.tools.fabric.road import Access, Road, admitted, choose_road, port_name
from nccl_doctor.tools.fabric.settings import rdma_settings
from nccl_doctor.tools.fabric.verbs import IBVERBS, active_mtus, barred_devices, ibverbs_error
from nccl_doctor.tools.firewall.culprits import (
    Suspects,
    follow_pairs,
    how_to_open,
    sample_for_rules,
    suspects,
    what_rules_say,
)
from nccl_doctor.tools.firewall.netfilter import quote_hit
from nccl_doctor.tools.firewall.portrules import (
    explains_knock,
    fits,
    how_to_let_pass,
    kept_out,
    rules_for_calls_in,
    somebody_did_not_knock,
    stopped_by,
    sure_hit,
)
from nccl_doctor.tools.firewall.rulesets import read_rules
from nccl_doctor.tools.gpu.gather import gather_gpus
from nccl_doctor.tools.gpu.judging import GPU_STATE_KINDS, hosts_without_gpu, judge_gpus
from nccl_doctor.tools.gpu.mapping import (
    GPU_GUESSED,
    GPU_HIDDEN,
    GPU_SHARED,
    LOCAL_RANK_BEYOND,
    SeenByRank,
    judge_mapping,
    sharing_is_meant,
)
from nccl_doctor.tools.gpu.nvml import STEP as ASKING_NVML
from nccl_doctor.tools.gpu.orders import GPU_ORDER, judge_orders
from nccl_doctor.tools.gpu.underload import LoadReader
from nccl_doctor.tools.groups.attempts import NEW_GROUP, Attempt, attempts_of
from nccl_doctor.tools.groups.culprits import is_open, judge_groups, round_compared, rounds_again
from nccl_doctor.tools.groups.deadlines import attempt_deadline
from nccl_doctor.tools.groups.doing import what_they_did
from nccl_doctor.tools.groups.exercise import SIZES, Exercise
from nccl_doctor.tools.groups.features import (
    Feature,
    failing_groups,
    judge_features,
    rounds_without,
)
from nccl_doctor.tools.groups.forming import beyond, form_world
from nccl_doctor.tools.groups.kinds import DEVICE_ID_HANG, GROUP_KINDS, GROUP_NEEDS
from nccl_doctor.tools.groups.making import Maker
from nccl_doctor.tools.hosts import (
    everybody_came_in,
    host_labels,
    likely_address,
    link_names,
    master_host,
    road_to_master,
    spans_machines,
)
from nccl_doctor.tools.isolation.judging import is_isolated, judge_isolation, rounds_of_isolation
from nccl_doctor.tools.machine.cgroup import cgroup_limits, memory_kills
from nccl_doctor.tools.machine.clocks import Offset, clock_is_synchronized, clock_offsets
from nccl_doctor.tools.machine.governors import holds_low, read_governors
from nccl_doctor.tools.machine.gpupeers import P2P_BROKEN, P2P_UNTESTED, judge_peers
from nccl_doctor.tools.machine.gpuplaces import pci_address, place_on_host
from nccl_doctor.tools.machine.gpurates import judge_gpu_rates, rate_figures, rates_table
from nccl_doctor.tools.machine.gpus import (
    EXCLUSIVE_PROCESS,
    VISIBLE,
    count_gpus,
    host_gpus,
    index_of_own,
    own_device,
    see_gpus,
    see_other_gpus,
    torch_build,
)
from nccl_doctor.tools.machine.gputables import gpu_error
from nccl_doctor.tools.machine.gpuwork import GPU_STEPS, DeviceWork, is_gpu_error
from nccl_doctor.tools.machine.libraries import COLUMNS as LIBRARY_COLUMNS
from nccl_doctor.tools.machine.libraries import (
    file_version,
    fingerprint,
    in_front,
    library_row,
    mapped_libraries,
    origin,
    own_version,
    shared_files,
    wheels,
)
from nccl_doctor.tools.machine.memoryerrors import (
    CORRECTED_TOO_MANY,
    by_module,
    memory_errors,
    memory_risen,
    module_names,
)
from nccl_doctor.tools.machine.nicplaces import (
    HOW_NEAR,
    NIC_FAR,
    NIC_PAIRS,
    judge_nics,
    nics_beside,
)
from nccl_doctor.tools.machine.pcieerrors import (
    by_link,
    pcie_errors,
    pcie_is_broken,
    pcie_outliers,
    pcie_risen,
    told_by_counts,
)
from nccl_doctor.tools.machine.privileges import in_user_namespace, privileges
from nccl_doctor.tools.machine.stuck import look_for_stuck
from nccl_doctor.tools.machine.stuckcauses import Cause as StuckCause
from nccl_doctor.tools.machine.stuckcauses import cause_of as stuck_cause
from nccl_doctor.tools.meeting.c10d import endpoint_host, is_host_told, matches_machine
from nccl_doctor.tools.meeting.road import knock
from nccl_doctor.tools.mesh.blame import narrow_to_mesh
from nccl_doctor.tools.mesh.build import build_mesh
from nccl_doctor.tools.mesh.places import mesh_on_hosts
from nccl_doctor.tools.mesh.shape import (
    mesh_in_words,
    mesh_size,
    nearest_meshes,
    own_groups,
    ranks_in_words,
)
from nccl_doctor.tools.nccl.conf import nccl_settings
from nccl_doctor.tools.nccl.ifchoice import has_infiniband, subnet_prefixes, survey
from nccl_doctor.tools.nccl.library import NCCL_LIBRARIES, mapped_nccl, nccl_version, nccl_wheels
from nccl_doctor.tools.nccl.loaded import loaded_nccl
from nccl_doctor.tools.nccl.plugin import first_plugin, plugin_build
from nccl_doctor.tools.nccl.pluginrange import plugin_range, takes_plugin
from nccl_doctor.tools.nccl.process_group import USE_NCCL2, process_group
from nccl_doctor.tools.net.dial import Dial, Origin, dial, has_route
from nccl_doctor.tools.net.interfaces import Interface, interfaces, is_link_local, is_loopback
from nccl_doctor.tools.net.names import SLOW_S, LookUp, look_up
from nccl_doctor.tools.net.ports import (
    ephemeral_range,
    may_bind,
    mesh_proxy,
    port_holder,
    port_range,
)
from nccl_doctor.tools.peers.calls import call_others, calls_deadline, hold_calls
from nccl_doctor.tools.peers.echo import Listeners, scoped
from nccl_doctor.tools.peers.matrix import (
    PeerCall,
    Sorted,
    job_roles,
    read_calls,
    sort_calls,
    unroutable_hosts,
)
from nccl_doctor.tools.shared_kinds import (
    ADDR_DIGITS_ONLY,
    ADDR_LOOPBACK,
    ADDR_UNRESOLVABLE,
    DRIVER_MISMATCH,
    FABRIC_MANAGER_DOWN,
    GPU_DIFFERS,
    GPU_SLOW,
    GPU_UNHEALTHY,
    MEMORY_ERRORS,
    MEMORY_FAILING,
    PCIE_ERRORS,
    PORT_BLOCKED,
    TIMEOUT_TOO_SHORT,
)
from nccl_doctor.tools.sidegroup.judging import (
    SIDE_BOUND,
    SIDE_CLEARED,
    SIDE_UNBOUND,
    judge_side_groups,
    needs_control,
    side_group_names,
)
from nccl_doctor.tools.sidegroup.meeting import (
    describe_default,
    meet_engine,
    meet_trainer,
    side_helper,
)
from nccl_doctor.tools.slurm import slurm_hosts
from nccl_doctor.tools.speed.figures import speed_figures
from nccl_doctor.tools.speed.measured import Measured, stand_out_again
from nccl_doctor.tools.speed.outliers import (
    algorithm_bandwidth,
    blame_edges,
    bus_bandwidth,
    ring,
    slow_ones,
)
from nccl_doctor.tools.speed.stopwatch import Stopwatch
from nccl_doctor.tools.timeouts.gather import gather_timeouts
from nccl_doctor.tools.timeouts.judging import judge_timeouts, told_by_load
from nccl_doctor.tools.timeouts.waits import waits, waits_table
from nccl_doctor.tools.timing.cpuwait import load_average
from nccl_doctor.tools.timing.slowness import Confirmed, Measure, confirm, read_measures, try_again
from nccl_doctor.tools.timing.timed import Pace, hold_meetings, nic_speed
from nccl_doctor.tools.timing.timetable import in_slots, tournament
from nccl_doctor.tools.timing.wire import Gate
from nccl_doctor.tools.variables.gather import gather_variables
from nccl_doctor.tools.variables.judging import judge_variables
from nccl_doctor.tools.versions import (
    OLDEST_DRIVER,
    Difference,
    Disagreement,
    arch_runs_on,
    differences,
    disagreement,
    major,
    minor_of,
    place_of,
    public,
    release,
)

__all__ = [
    "ADDR_DIGITS_ONLY",
    "ADDR_LOOPBACK",
    "ADDR_UNRESOLVABLE",
    "ALONE",
    "ASKING_NVML",
    "CORRECTED_TOO_MANY",
    "DEVICE_ID_HANG",
    "DRIVER_MISMATCH",
    "EXCLUSIVE_PROCESS",
    "FABRIC_MANAGER_DOWN",
    "GID_SETTINGS",
    "GPU_DIFFERS",
    "GPU_GUESSED",
    "GPU_HIDDEN",
    "GPU_ORDER",
    "GPU_SHARED",
    "GPU_SLOW",
    "GPU_STATE_KINDS",
    "GPU_STEPS",
    "GPU_UNHEALTHY",
    "GROUP_KINDS",
    "GROUP_NEEDS",
    "HCA",
    "HOW_NEAR",
    "IBVERBS",
    "IMPORT_DEEPSPEED",
    "LIBRARY_COLUMNS",
    "LOCAL_RANK_BEYOND",
    "MEMORY_ERRORS",
    "MEMORY_FAILING",
    "NCCL_LIBRARIES",
    "NEW_GROUP",
    "NIC_FAR",
    "NIC_PAIRS",
    "OLDEST_DRIVER",
    "P2P_BROKEN",
    "P2P_UNTESTED",
    "PCIE_ERRORS",
    "PORT_BLOCKED",
    "SEARCHES_SINCE",
    "SIDE_BOUND",
    "SIDE_CLEARED",
    "SIDE_UNBOUND",
    "SIZES",
    "SLOW_S",
    "TIMEOUT_TOO_SHORT",
    "USE_NCCL2",
    "VISIBLE",
    "Access",
    "Attempt",
    "Cause",
    "Check",
    "Cluster",
    "Confidence",
    "Confirmed",
    "Context",
    "DeviceWork",
    "Dial",
    "Difference",
    "Disagreement",
    "Evidence",
    "Exercise",
    "Feature",
    "Figure",
    "Finding",
    "Gate",
    "GidKind",
    "HcaList",
    "Host",
    "Interface",
    "Job",
    "Kind",
    "Launch",
    "LaunchProblem",
    "Layer",
    "Level",
    "LinkBlame",
    "Listeners",
    "LoadReader",
    "LookUp",
    "Maker",
    "Measure",
    "Measured",
    "Odd",
    "Offset",
    "Origin",
    "Outcome",
    "OutcomeStatus",
    "Pace",
    "PeerCall",
    "Peers",
    "PickedGid",
    "PortDown",
    "RailCall",
    "RailEnd",
    "Rank",
    "Road",
    "Round",
    "Scope",
    "SeenByRank",
    "Severity",
    "Skip",
    "Sorted",
    "Stopwatch",
    "StuckCause",
    "Suspects",
    "Untested",
    "Where",
    "accelerator_of",
    "active_mtus",
    "admitted",
    "algorithm_bandwidth",
    "arch_runs_on",
    "as_ranks_want",
    "attempt_deadline",
    "attempts_of",
    "barred_devices",
    "beyond",
    "blame_binding",
    "blame_edges",
    "blame_links",
    "build_mesh",
    "bus_bandwidth",
    "by_link",
    "by_module",
    "call_others",
    "call_rails",
    "calls_deadline",
    "cgroup_limits",
    "choose_road",
    "claimed_ranks",
    "clock_is_synchronized",
    "clock_offsets",
    "confirm",
    "copies_arrive",
    "count_gpus",
    "counters_full",
    "counters_risen",
    "describe_default",
    "dial",
    "differences",
    "disagreement",
    "endpoint_host",
    "ephemeral_range",
    "error_counters",
    "everybody_came_in",
    "explains_knock",
    "failing_groups",
    "file_version",
    "fingerprint",
    "first_plugin",
    "fits",
    "fixed_index",
    "follow_pairs",
    "form_world",
    "gather_deepspeed",
    "gather_gpus",
    "gather_timeouts",
    "gather_variables",
    "gid_kind",
    "gid_tables",
    "gpu_direct_road",
    "gpu_error",
    "hand_over",
    "has_infiniband",
    "has_route",
    "hold_calls",
    "hold_meetings",
    "holds_low",
    "host_gpus",
    "host_labels",
    "hosts_without_gpu",
    "how_to_let_pass",
    "how_to_open",
    "ibverbs_error",
    "import_deepspeed",
    "in_front",
    "in_slots",
    "in_user_namespace",
    "index_of_own",
    "init_by_deepspeed",
    "interfaces",
    "is_gpu_error",
    "is_host_told",
    "is_isolated",
    "is_link_local",
    "is_loopback",
    "is_open",
    "job_roles",
    "joined_by_pcie",
    "judge_binding",
    "judge_deepspeed",
    "judge_features",
    "judge_gpu_rates",
    "judge_gpus",
    "judge_groups",
    "judge_isolation",
    "judge_mapping",
    "judge_nics",
    "judge_orders",
    "judge_peers",
    "judge_side_groups",
    "judge_timeouts",
    "judge_variables",
    "kept_out",
    "knock",
    "library_row",
    "likely_address",
    "link_names",
    "lists_of_ranks",
    "load_average",
    "loaded_nccl",
    "look_for_stuck",
    "look_up",
    "major",
    "mapped_libraries",
    "mapped_nccl",
    "master_host",
    "matches_machine",
    "may_bind",
    "meet_engine",
    "meet_trainer",
    "memory_errors",
    "memory_kills",
    "memory_risen",
    "mesh_in_words",
    "mesh_on_hosts",
    "mesh_proxy",
    "mesh_size",
    "minor_of",
    "module_names",
    "narrow_to_mesh",
    "nccl_settings",
    "nccl_version",
    "nccl_wheels",
    "nearest_meshes",
    "needs_control",
    "nic_speed",
    "nics_beside",
    "number_range",
    "odd_ones_out",
    "origin",
    "own_device",
    "own_groups",
    "own_version",
    "pci_address",
    "pcie_errors",
    "pcie_is_broken",
    "pcie_outliers",
    "pcie_risen",
    "pick_gid",
    "place_of",
    "place_on_host",
    "plugin_build",
    "plugin_range",
    "port_holder",
    "port_name",
    "port_range",
    "ports_down",
    "privileges",
    "process_group",
    "public",
    "quote_hit",
    "rails_of",
    "rails_to_call",
    "ranks_in_words",
    "rate_figures",
    "rates_table",
    "rdma_admits",
    "rdma_devices",
    "rdma_off",
    "rdma_ports",
    "rdma_settings",
    "read_calls",
    "read_governors",
    "read_gpu_direct",
    "read_measures",
    "read_rail_calls",
    "read_rules",
    "redirecting_bridges",
    "release",
    "ring",
    "road_to_master",
    "round_compared",
    "rounds_again",
    "rounds_of_isolation",
    "rounds_without",
    "rules_for_calls_in",
    "sample_for_rules",
    "scoped",
    "see_gpus",
    "see_other_gpus",
    "seen_by_rdma",
    "shared_files",
    "sharing_is_meant",
    "side_group_names",
    "side_helper",
    "slow_ones",
    "slurm_hosts",
    "somebody_did_not_knock",
    "sort_calls",
    "spans_machines",
    "speaks_verbs",
    "speed_figures",
    "stand_out_again",
    "stands_for",
    "stopped_by",
    "stuck_cause",
    "subnet_prefixes",
    "sure_hit",
    "survey",
    "suspects",
    "table_of_picks",
    "takes_plugin",
    "told_by_counts",
    "told_by_load",
    "torch_build",
    "tournament",
    "translating",
    "try_again",
    "unread_bridges",
    "unroutable_hosts",
    "waits",
    "waits_table",
    "wanted_kind",
    "what_rules_say",
    "what_they_did",
    "wheels",
]
