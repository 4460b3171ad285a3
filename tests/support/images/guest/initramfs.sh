#!/busybox sh
# The first process: loads the drivers, mounts the disk with the serial number "root", and starts its /sbin/init.
/busybox mount -t proc proc /proc
/busybox mount -t sysfs sys /sys
/busybox mount -t devtmpfs dev /dev
for module in /modules/*; do /busybox insmod "$module"; done
while :; do
  for disk in /sys/block/vd*; do
    [ "$(/busybox cat "$disk/serial" 2>/dev/null)" = root ] && break 2
  done
  /busybox usleep 10000
done
/busybox mount -t ext4 -o ro "/dev/${disk##*/}" /root || exec /busybox poweroff -f
/busybox mount -o move /dev /root/dev
/busybox mount -o move /proc /root/proc
/busybox mount -o move /sys /root/sys
exec /busybox switch_root /root /sbin/init
