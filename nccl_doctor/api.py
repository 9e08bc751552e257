"""Names that most checks need; everything else comes by module, from `nccl_doctor.toolkit`.

A check is a class with two methods and a few constants, in one file of `checks/`, in a folder of
`checks/` with its rules beside it, or in a plug-in:

* `observe(ctx)` looks at the system and returns JSON-able facts. It runs in a child process with a
  deadline; whatever it does, it cannot hurt the run.
* `judge(cluster)` is a pure function from everybody's facts to findings.
* `figures(cluster)`, optional: values worth comparing with other runs; pure as well.
* `sections(cluster)`, optional: links for the map of the network, and what issue forms ask for.
* `plan(cluster)`, only for checks that observe *together*: which participants meet in which round.

An unexpected error is left to the engine: an exception in `observe` or `judge` makes the check
`unknown`, never `pass`.
"""

from __future__ import annotations

from nccl_doctor.model.check import Check as Check
from nccl_doctor.model.check import Context as Context
from nccl_doctor.model.check import Peers as Peers
from nccl_doctor.model.check import Skip as Skip
from nccl_doctor.model.check import SocketHandoff as SocketHandoff
from nccl_doctor.model.check import Untested as Untested
from nccl_doctor.model.cluster import AFTER_LOSS as AFTER_LOSS
from nccl_doctor.model.cluster import ALONE as ALONE
from nccl_doctor.model.cluster import BEFORE as BEFORE
from nccl_doctor.model.cluster import Cluster as Cluster
from nccl_doctor.model.cluster import Evidence as Evidence
from nccl_doctor.model.cluster import Host as Host
from nccl_doctor.model.cluster import Outcome as Outcome
from nccl_doctor.model.cluster import OutcomeStatus as OutcomeStatus
from nccl_doctor.model.cluster import Rank as Rank
from nccl_doctor.model.commands import Command as Command
from nccl_doctor.model.commands import shell as shell
from nccl_doctor.model.commands import word as word
from nccl_doctor.model.findings import Confidence as Confidence
from nccl_doctor.model.findings import Effect as Effect
from nccl_doctor.model.findings import Figure as Figure
from nccl_doctor.model.findings import Finding as Finding
from nccl_doctor.model.findings import Kind as Kind
from nccl_doctor.model.findings import Layer as Layer
from nccl_doctor.model.findings import Level as Level
from nccl_doctor.model.findings import Round as Round
from nccl_doctor.model.findings import Scope as Scope
from nccl_doctor.model.findings import Severity as Severity
from nccl_doctor.model.findings import Turn as Turn
from nccl_doctor.model.findings import Where as Where
from nccl_doctor.model.findings import number_range as number_range
from nccl_doctor.model.fixes import Fix as Fix
from nccl_doctor.model.fixes import On as On
from nccl_doctor.model.fixes import Step as Step
from nccl_doctor.model.fixes import export as export
from nccl_doctor.model.fixes import fill as fill
from nccl_doctor.model.fixes import fill_each as fill_each
from nccl_doctor.model.fixes import look as look
from nccl_doctor.model.job import Job as Job
from nccl_doctor.model.launch import Launch as Launch
from nccl_doctor.model.launch import LaunchProblem as LaunchProblem
from nccl_doctor.model.sections import HostLink as HostLink
from nccl_doctor.model.sections import Section as Section
from nccl_doctor.model.sections import Setup as Setup
from nccl_doctor.toolkit.blame import Cause as Cause
from nccl_doctor.toolkit.blame import LinkBlame as LinkBlame
from nccl_doctor.toolkit.blame import Odd as Odd
from nccl_doctor.toolkit.blame import blame_links as blame_links
from nccl_doctor.toolkit.blame import odd_ones_out as odd_ones_out
from nccl_doctor.toolkit.hosts import host_labels as host_labels
from nccl_doctor.toolkit.hosts import likely_address as likely_address
from nccl_doctor.toolkit.hosts import master_host as master_host
from nccl_doctor.toolkit.hosts import spans_machines as spans_machines
from nccl_doctor.toolkit.versions import place_of as place_of
