// Package backup writes the blocks of a snapshot to a file, as a full backup or as an increment
// to an earlier one, and restores a volume from such files.
//
// # The file
//
// Numbers are big-endian. A digest is the SHA-256 of the digest before it and of the bytes
// between the two, so that the last one covers the whole file.
//
//	file   = header frame* done
//	header = "CRUSTBK1", length of the JSON (4 bytes), JSON (Header), digest
//	frame  = "DATA", offset (8), size (8), size bytes of the volume, digest
//	       | "ZERO", offset (8), size (8), digest: all bytes are zero
//	done   = "DONE", size of the volume (8), bytes in all DATA (8), digest
//
// Frames ascend and do not overlap; DATA has at most 1 MiB. Bytes in no frame are zero in a full backup, and
// unchanged in an increment. An increment names its base by the base's last digest. A file without DONE is
// incomplete: it is called FILE.part, and the same backup resumes it.
package backup
