# The second half of a guest's start, on the host's root; then the job, then the end.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
# By name, as not all of them are loaded by the first use of what they have; a kernel without one has a reason.
for module in veth sch_ingress cls_bpf nf_tables nf_conntrack_netlink nft_ct nft_nat nft_masq nft_chain_nat nft_objref \
    sch_netem sch_fq 8021q vrf wireguard sctp dummy tun; do
    modprobe -q "$module" || echo "no module $module"
done
# A list of connections walks all buckets; tests look often, at few connections. The limit stays what the memory gives.
echo 4096 >/sys/module/nf_conntrack/parameters/hashsize
. /guest/job.sh >/guest/output 2>&1
echo $? >/guest/status
sync
echo o >/proc/sysrq-trigger
sleep 10
poweroff -f
