// Package driver is crust-proxy's reference CSI driver. A volume is a sparse
// image file in a data directory, attached by a loop device.
//
// What it knows lies in two places, and nowhere else: one record file a volume in
// the data directory, and the kernel (which loop device is over which image, what
// is mounted where). Nothing is kept in memory, so it may be killed at any point;
// the same call then does what was left. An intent is recorded before it is
// carried out, and forgotten after it was undone.
//
// A clone is a file of its own that shares its data with its source (FICLONE), or a copy
// with all holes where the filesystem of the data directory cannot do that. Neither knows
// of the other afterwards, and each may be deleted first. A snapshot is such a clone that is
// never attached. What is in use is frozen for the moment in which its data is shared, where
// that is possible; the record of a snapshot says whether it is consistent as a filesystem,
// or only as after a crash. Snapshots of a group are made together, or none of them is.
//
// Changed blocks are found in what snapshots share: an extent at the same place of the disk
// in two of them has not changed between them. Nothing is tracked, so that also a deleted
// snapshot in between, or a driver that did not run, loses no change. Where nothing is
// shared, or where a place says nothing, as with compression, the data is compared.
package driver
