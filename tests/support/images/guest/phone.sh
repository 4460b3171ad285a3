#!/apex/init/busybox sh
# The phone's init: mounts, the network, adbd as the ordinary user `shell`, and a shell on the console for the tests.
# Disks are told apart by their serial numbers: root (read only), state, which is /data, and settings.
B=/apex/init/busybox

disk() {
  for found in /sys/block/vd*; do
    [ "$($B cat "$found/serial")" = "$1" ] && echo "/dev/${found##*/}"
  done
}

$B mkdir -p /dev/pts /dev/shims
$B mount -t devpts -o mode=620,ptmxmode=666 pts /dev/pts
$B mount -t tmpfs -o mode=755 shims /dev/shims
$B mount -t ext4 -o noatime,nosuid,nodev "$(disk state)" /data || { echo "phone: its disk is broken"; exec $B poweroff -f; }
$B tr -d '\000' <"$(disk settings)" >/dev/shims/settings
. /dev/shims/settings
echo "$SERIAL" >/dev/shims/serial
$B mkdir -p /data/local/tmp /data/shims
$B chown 2000:2000 /data/local/tmp
$B chmod 771 /data /data/local /data/local/tmp
$B hostname localhost
$B ip link set lo up
$B ip link set eth0 up
$B ip addr add 10.0.2.15/24 dev eth0
$B stty -echo -onlcr </dev/console

R=/rtl/aarch64-linux-gnu
while :; do
  $B su -s /system/bin/sh shell -c "cd /; exec $B env -i PATH=/system/bin HOME=/ TMPDIR=/data/local/tmp ANDROID_DATA=/data ANDROID_ROOT=/system\
 ADBD_PORT=5555 /rtl/ld-linux-aarch64.so.1 --library-path $R:$R/android /apex/adbd/adbd" 2>&1
  echo "phone: adbd ended with $?"
  $B sleep 1
done &

echo "phone: up"
# A line is NUMBER COMMAND. Its output comes as lines "#NUMBER| ...", then "#NUMBER= EXITCODE".
while read -r number command; do
  (eval "$command") >/dev/shims/output 2>&1 </dev/null
  code=$?
  $B sed "s/^/#$number| /" /dev/shims/output
  echo
  echo "#$number= $code"
done </dev/console
exec $B poweroff -f
