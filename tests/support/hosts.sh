# Two "hosts" on one machine: network namespaces joined by a veth pair, each with a name and addresses of its own. To be sourced.
#   hosts_up      makes them; FIRST and SECOND are their namespaces, h1 (10.9.0.1) and h2 (10.9.0.2) their names and addresses
#   on NS CMD..   becomes a command on one, under its host name: call it in the background or in a subshell
#   hosts_down    ends every process on them and takes all away; put it into a trap before hosts_up
# LINK_RATE, such as 50mbit, slows the link between them. Needs root. Names hold this process's id, so that several pairs go beside each other.
FIRST=ft$$-1 SECOND=ft$$-2
HOSTS_FILES=$(mktemp -d)

hosts_up() {
  local ns
  for ns in "$FIRST" "$SECOND"; do
    ip netns add "$ns"
    ip -n "$ns" link set lo up
  done
  # As Debian's installer writes it: a host's own name is no address that others could reach.
  printf '127.0.0.1 localhost\n127.0.1.1 h1\n10.9.0.2 h2\n' >"$HOSTS_FILES/h1"
  printf '127.0.0.1 localhost\n10.9.0.1 h1\n127.0.1.1 h2\n' >"$HOSTS_FILES/h2"
  ip link add name "ft$$a" netns "$FIRST" type veth peer name "ft$$b" netns "$SECOND"
  ip -n "$FIRST" addr add 10.9.0.1/24 dev "ft$$a"
  ip -n "$SECOND" addr add 10.9.0.2/24 dev "ft$$b"
  ip -n "$FIRST" link set "ft$$a" up
  ip -n "$SECOND" link set "ft$$b" up
  if [[ -n ${LINK_RATE:-} ]]; then
    ip netns exec "$FIRST" tc qdisc add dev "ft$$a" root tbf rate "$LINK_RATE" burst 64kbit latency 400ms
    ip netns exec "$SECOND" tc qdisc add dev "ft$$b" root tbf rate "$LINK_RATE" burst 64kbit latency 400ms
  fi
}

on() {
  local ns=$1 name=h1
  shift
  [[ $ns == "$SECOND" ]] && name=h2
  exec setsid nsenter --net="/run/netns/$ns" unshare --uts --mount \
    sh -c 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"' "$name" "$HOSTS_FILES/$name" "$@"
}

hosts_down() {
  local ns pids
  for ns in "$FIRST" "$SECOND"; do
    [[ -e /run/netns/$ns ]] || continue
    pids=$(ip netns pids "$ns") && [[ -n $pids ]] && kill -KILL $pids 2>/dev/null
    ip netns del "$ns"
  done
  rm -rf "$HOSTS_FILES"
}
