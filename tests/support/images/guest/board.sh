#!/bin/busybox sh
# The board's init: mounts, the network, the agent as a service that is started again whenever it ends, and a shell on the
# console for the tests. Disks are told apart by their serial numbers: root (read only), agent (read only), state, settings.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
B=/bin/busybox

disk() {
  for found in /sys/block/vd*; do
    [ "$($B cat "$found/serial")" = "$1" ] && echo "/dev/${found##*/}"
  done
}

$B mount -t tmpfs -o mode=755 run /run
$B mount -t tmpfs -o mode=1777 tmp /tmp
$B mkdir -p /dev/shm /dev/pts
$B mount -t tmpfs -o mode=1777 shm /dev/shm
$B mount -t devpts pts /dev/pts
$B mount -t ext4 -o ro "$(disk agent)" /farm
$B mount -t ext4 -o noatime "$(disk state)" /var/lib/etfarm || { echo "board: its disk is broken"; exec $B poweroff -f; }
$B tr -d '\000' <"$(disk settings)" >/run/settings
. /run/settings
[ -s /var/lib/etfarm/machine-id ] || { echo "$MACHINE_ID" >/var/lib/etfarm/machine-id; $B sync; }
$B chown -R etfarm:etfarm /var/lib/etfarm
$B hostname board
$B ip link set lo up
$B ip link set eth0 up
$B ip addr add 10.0.2.15/24 dev eth0
$B ip route add default via 10.0.2.2
$B stty -echo -onlcr </dev/console

export HOME=/var/lib/etfarm PYTHONPATH=/farm ETFARM_SERVER ETFARM_TOKEN
while :; do
  $B su -s /bin/sh etfarm -c "cd; exec /usr/bin/python3.11 -m etfarm.wire.command agent $AGENT" 2>&1
  echo "board: the agent ended with $?"
  $B sleep 1
done &

echo "board: up"
# A line is NUMBER COMMAND. Its output comes as lines "#NUMBER| ...", then "#NUMBER= EXITCODE".
while read -r number command; do
  (eval "$command") >/run/output 2>&1 </dev/null
  code=$?
  $B sed "s/^/#$number| /" /run/output
  echo
  echo "#$number= $code"
done </dev/console
exec $B poweroff -f
