package superblock

import (
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestRootDirectory: the group and mode of the root directory are found in filesystems
// of several forms, without mounting them.
func TestRootDirectory(t *testing.T) {
	proto := filepath.Join(t.TempDir(), "proto")
	check.Must(t, os.WriteFile(proto, []byte("/\n0 0\nd--775 0 70000\n$\n"), 0o600))
	for name, c := range map[string]struct {
		fsType string
		size   int64
		args   []string
	}{
		"ext4":                {"ext4", 64 << 20, nil},
		"blocks of 1 KiB":     {"ext4", 64 << 20, []string{"-b", "1024"}},
		"blocks of 2 KiB":     {"ext4", 64 << 20, []string{"-b", "2048", "-I", "1024"}},
		"without 64bit":       {"ext4", 64 << 20, []string{"-O", "^64bit", "-I", "128"}},
		"ext2":                {"ext2", 8 << 20, nil},
		"meta_bg":             {"ext4", 64 << 20, []string{"-O", "meta_bg,^resize_inode"}},
		"xfs":                 {"xfs", 320 << 20, nil},
		"xfs, inodes of 2KiB": {"xfs", 320 << 20, []string{"-i", "size=2048"}},
		"xfs, blocks of 1KiB": {"xfs", 320 << 20, []string{"-b", "size=1024"}},
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"-q"}, c.args...)
			if c.fsType == "xfs" {
				args = append(args, "-p", proto)
			} else {
				args = append(args, "-E", "root_owner=0:70000")
			}
			path := image(t, c.size, "mkfs."+c.fsType, args...)
			if c.fsType != "xfs" {
				check.Run(t, exec.Command("debugfs", "-w", "-R", "set_inode_field <2> mode 040775", path))
			}
			root := read(t, path, c.fsType).Root
			check.Require(t, root != nil && root.Group == 70000 && root.Mode == 0o40775, "%+v", root)
		})
	}
	root := read(t, image(t, 256<<20, "mkfs.btrfs", "-q"), "btrfs").Root
	check.That(t, root == nil, "btrfs: %+v", root)
}

func TestWritableFor(t *testing.T) {
	for _, c := range []struct {
		root  Root
		group string
		want  bool
	}{
		{Root{1000, 0o40775}, "1000", true},
		{Root{1000, 0o40755}, "1000", false},
		{Root{0, 0o40775}, "1000", false},
		{Root{0, 0o40777}, "1000", true},
		{Root{0, 0o40770}, "", false},
		{Root{1, 0o40770}, "4294967297", false},
	} {
		check.Equal(t, c.root.WritableFor(c.group), c.want, "%+v for %q", c.root, c.group)
	}
}

// TestHostileRoot: numbers that lead nowhere lead to no root, and the rest is read.
func TestHostileRoot(t *testing.T) {
	le := binary.LittleEndian
	for name, change := range map[string]func(raw []byte){
		"first block":      func(raw []byte) { le.PutUint32(raw[extStart+extFirstBlock:], ^uint32(0)) },
		"inode size":       func(raw []byte) { le.PutUint16(raw[extStart+extInodeSize:], 0xffff) },
		"odd inode size":   func(raw []byte) { le.PutUint16(raw[extStart+extInodeSize:], 300) },
		"table at the end": func(raw []byte) { le.PutUint32(raw[2048+extTable:], ^uint32(0)) },
		"no table":         func(raw []byte) { le.PutUint32(raw[2048+extTable:], 0) },
		"not a directory":  func(raw []byte) { le.PutUint32(raw[2048+extTable:], 1) },
	} {
		raw := extImage(func(super []byte) {
			le.PutUint32(super[extFirstBlock:], 1)
			le.PutUint16(super[extInodeSize:], 256)
		})
		le.PutUint32(raw[2048+extTable:], 3)
		le.PutUint16(raw[3*1024+256:], 0o40755)
		super, err := Read(bytesAt(raw), "ext4")
		check.Require(t, err == nil && super.Root != nil, "unchanged: %+v, %v", super, err)
		change(raw)
		super, err = Read(bytesAt(raw), "ext4")
		check.That(t, err == nil && super.Root == nil && super.Bytes != 0, "%s: %+v, %v", name, super, err)
	}
}
