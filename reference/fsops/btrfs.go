package fsops

// What the kernel's linux/btrfs.h says.
const (
	btrfsIocResize      = 0x50009403
	btrfsIocDevInfo     = 0xd000941e
	btrfsIocFSInfo      = 0x8400941f
	btrfsIocGetDevStats = 0xc4089434
)

// btrfsMostDevices bounds a look at all devices.
const btrfsMostDevices = 1024

// btrfsCounters are the names of btrfsDevStats.Values.
var btrfsCounters = [...]string{"write errors", "read errors", "flush errors", "corruptions", "wrong generations"}

type btrfsFSInfo struct {
	MaxID, Devices uint64
	FSID           [16]byte
	Node, Sector   uint32
	_              [984]byte
}

type btrfsDevStats struct {
	DevID, Items, Flags uint64
	Values              [len(btrfsCounters)]uint64
	_                   [121]uint64
}

type btrfsDevInfo struct {
	DevID      uint64
	UUID       [16]byte
	BytesUsed  uint64
	TotalBytes uint64
	_          [379]uint64
	Path       [1024]byte
}

type btrfsVolArgs struct {
	FD   int64
	Name [4088]byte
}
