#!/bin/busybox sh
# The first process of a guest: puts the host's root together, with everything the guest writes kept in memory.
set -e
b=/bin/busybox
trap 'echo "the guest cannot start"; $b poweroff -f' EXIT
$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs devtmpfs /dev
for module in $($b cat /modules/order); do $b insmod "/modules/$module"; done

share() { $b mount -t 9p -o "trans=virtio,version=9p2000.L,msize=524288,$3" "$1" "$2"; }
$b mkdir -p /host /memory /root
share host /host ro,cache=loose,noatime
$b mount -t tmpfs -o size=75% tmpfs /memory
$b mkdir /memory/upper /memory/work
$b mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work overlay /root
for folder in proc sys dev; do $b mount --move /$folder /root/$folder; done
$b mount -t tmpfs tmpfs /root/run
$b mkdir -p /root/lib/modules /root/guest
$b mount -t tmpfs tmpfs /root/lib/modules
$b mkdir "/root/lib/modules/$($b uname -r)"
share modules "/root/lib/modules/$($b uname -r)" ro,cache=loose
share guest /root/guest rw
trap - EXIT
exec $b switch_root /root /bin/sh /guest/boot.sh
