// Package driver is crust-proxy's reference CSI driver. A volume is a sparse
// image file in a data directory, attached by a loop device.
//
// Its state is in two places only: one record file for each volume in the data directory,
// and the kernel (which loop device is over which image, what is mounted where). Nothing is
// kept in memory, so the driver may be killed at any point; when the same call is repeated,
// it completes the missing steps. A step is recorded before it is done, and the record is
// removed after the step was undone.
//
// A clone is a file of its own that shares its data with its source (FICLONE). Where the
// filesystem of the data directory cannot share data, it is a copy that keeps the holes.
// Either of the two may be deleted first. A snapshot is a clone that is never attached. The
// filesystem of a volume in use is frozen while its data is shared, if that is possible. The
// record of a snapshot says whether the filesystem in it is consistent, or as after a crash.
// The snapshots of a group are all made, or none of them is.
//
// Changed blocks are found by comparing the extents of two snapshots: an extent at the same
// place of the disk in both has not changed. Nothing is tracked, so no change is lost when a
// snapshot in between is deleted or the driver does not run. Where nothing is shared, or the
// place of an extent proves nothing, as with compression, the data is compared.
package driver
