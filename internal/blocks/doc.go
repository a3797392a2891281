// Package blocks reads which blocks of a volume's snapshot have data, or have changed since
// an earlier snapshot. It speaks CSI's SnapshotMetadata service on a driver's socket, and the
// service of the same name that external-snapshot-metadata serves in a Kubernetes cluster.
//
// What a server sends is checked before it is used: backups are made by it.
package blocks
