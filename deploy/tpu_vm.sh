#!/usr/bin/env bash
# Train on one TPU VM or slice, with samplers on others: start the trainer, then a sampler on each of the other VMs.
#
#   deploy/tpu_vm.sh [--dry_run] --zone ZONE --trainer VM --samplers VM,VM --run_dir DIR -- ARGUMENTS OF rolljax.train
#
# rolljax is installed on all VMs in $PYTHON (default: rolljax/.venv/bin/python, in the home folder), and DIR is a folder
# that the trainer's hosts share. ARGUMENTS name the store of weights (Remote.weights), such as a bucket. The
# trainer and each sampler may have several hosts. Each program logs to rolljax.log in the home folder of its VM, and goes
# on when this script has ended. --dry_run prints the commands. Needs gcloud.

set -euo pipefail

python=${PYTHON:-rolljax/.venv/bin/python}
port=8477
dry_run=false zone='' trainer='' samplers='' run_dir=''

fail() {
  echo "tpu_vm.sh: $1" >&2
  exit 2
}

# Print words as a shell reads them again.
quoted() {
  local word
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then printf '%s ' "$word"; else printf '%s ' "${word@Q}"; fi
  done
}

run() {
  if $dry_run; then
    quoted "$@"
    echo
  else
    "$@"
  fi
}

# Run a command on hosts of a VM: on_vm NAME HOSTS COMMAND.
on_vm() {
  run gcloud compute tpus tpu-vm ssh "$1" --zone "$zone" --worker "$2" --command "$3"
}

# Return what a command on the first host prints; in a dry run show the command, and return a word for it.
from_vm() {
  if $dry_run; then
    on_vm "$1" 0 "$2" >&2
    echo "$3"
  else
    on_vm "$1" 0 "$2"
  fi
}

in_background() {
  echo "nohup $1 > rolljax.log 2>&1 < /dev/null &"
}

while (($#)); do
  case $1 in
    --dry_run) dry_run=true ;;
    --zone | --trainer | --samplers | --run_dir)
      (($# > 1)) || fail "$1 needs a value"
      printf -v "${1#--}" '%s' "$2"
      shift
      ;;
    --)
      shift
      break
      ;;
    *) fail "unknown argument $1" ;;
  esac
  shift
done
for name in zone trainer samplers run_dir; do
  [[ -n ${!name} ]] || fail "--$name is needed"
done
IFS=, read -ra names <<< "$samplers"

train=(-m rolljax.train "$@" --run_dir "$run_dir" --set 'Recipe.placement = @Remote()' --set 'Remote.launcher = @Join()'
  --set "Join.port = $port" --set "Remote.samplers = ${#names[@]}")
on_vm "$trainer" all "$(in_background "$python $(quoted "${train[@]}")")"

key_file=$(quoted "$run_dir/samplers/key")
key=$(from_vm "$trainer" "until test -s $key_file; do sleep 1; done; cat $key_file" KEY)
address=$(from_vm "$trainer" "hostname -I | cut -d' ' -f1" ADDRESS)

for name in "${names[@]}"; do
  on_vm "$name" 0 'umask 077; cat > rolljax.key' <<< "$key"
  sampler="$python -m rolljax.sampler_host --join $address:$port --key_file rolljax.key --name $name"
  on_vm "$name" all "$(in_background "$sampler")"
done
