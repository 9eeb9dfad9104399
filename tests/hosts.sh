# Two "hosts" on one machine: network namespaces joined by a veth pair, each with a name and addresses of its own. To be sourced.
#   hosts_up      makes them; FIRST and SECOND are their namespaces, h1 (10.9.0.1) and h2 (10.9.0.2) their names and addresses
#   on NS CMD..   runs a command on one, with its host name
#   hosts_down    ends every process on them and takes all away; put it into a trap before hosts_up
# Needs root. Names hold this process's id, so that several pairs go beside each other.
FIRST=ft$$-1 SECOND=ft$$-2

hosts_up() {
  local ns
  for ns in "$FIRST" "$SECOND"; do
    ip netns add "$ns"
    ip -n "$ns" link set lo up
    mkdir -p "/etc/netns/$ns" # ip netns exec mounts what is there over /etc
  done
  # As Debian's installer writes it: a host's own name is no address that others could reach.
  printf '127.0.0.1 localhost\n127.0.1.1 h1\n10.9.0.2 h2\n' >"/etc/netns/$FIRST/hosts"
  printf '127.0.0.1 localhost\n10.9.0.1 h1\n127.0.1.1 h2\n' >"/etc/netns/$SECOND/hosts"
  ip link add name "ft$$a" netns "$FIRST" type veth peer name "ft$$b" netns "$SECOND"
  ip -n "$FIRST" addr add 10.9.0.1/24 dev "ft$$a"
  ip -n "$SECOND" addr add 10.9.0.2/24 dev "ft$$b"
  ip -n "$FIRST" link set "ft$$a" up
  ip -n "$SECOND" link set "ft$$b" up
}

on() {
  local ns=$1 name=h1
  shift
  [[ $ns == "$SECOND" ]] && name=h2
  exec ip netns exec "$ns" setsid unshare --uts sh -c 'hostname "$0" && exec "$@"' "$name" "$@"
}

hosts_down() {
  local ns pids
  for ns in "$FIRST" "$SECOND"; do
    [[ -e /run/netns/$ns ]] || continue
    pids=$(ip netns pids "$ns") && [[ -n $pids ]] && kill -KILL $pids 2>/dev/null
    ip netns del "$ns"
    rm -rf "/etc/netns/$ns"
  done
  rmdir /etc/netns 2>/dev/null
  true
}
