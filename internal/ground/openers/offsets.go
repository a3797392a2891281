package openers

import (
	"fmt"
	"math"

	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

// field is a member of a structure of the running kernel.
type field struct {
	offset int32
	bytes  int32
	size   asm.Size // of a load of the member
}

// layout finds members of the kernel's structures by its BTF, which every kernel describes itself
// with. After the first failure it finds nothing more.
type layout struct {
	spec *btf.Spec
	err  error
}

// member finds a member, which may lie in an anonymous structure or union.
func (l *layout) member(structure, name string) field {
	var found *btf.Struct
	if l.err == nil {
		l.err = l.spec.TypeByName(structure, &found)
	}
	if l.err != nil {
		return field{}
	}
	offset, kind, ok := memberOf(found.Members, name)
	if !ok || offset > math.MaxInt16 {
		l.err = fmt.Errorf("the kernel's struct %s has no member %s", structure, name)
		return field{}
	}
	f := field{offset: int32(offset), bytes: 8, size: asm.DWord}
	if size, err := btf.Sizeof(kind); err == nil && size < 8 {
		f.bytes, f.size = 4, asm.Word
		if size == 2 {
			f.bytes, f.size = 2, asm.Half
		}
	}
	return f
}

func memberOf(members []btf.Member, name string) (offset uint32, kind btf.Type, ok bool) {
	for _, m := range members {
		if m.Name == name {
			return m.Offset.Bytes(), m.Type, true
		}
		if m.Name != "" {
			continue
		}
		var inner []btf.Member
		switch of := btf.UnderlyingType(m.Type).(type) {
		case *btf.Struct:
			inner = of.Members
		case *btf.Union:
			inner = of.Members
		}
		if offset, kind, ok := memberOf(inner, name); ok {
			return m.Offset.Bytes() + offset, kind, true
		}
	}
	return 0, nil, false
}

// fileFields are the members that say which inode a file has, and who else has that.
type fileFields struct {
	mode, inode, mapping   field // struct file
	host                   field // struct address_space
	kind, number, writers  field // struct inode
	serial, super          field // struct inode
	magic, device          field // struct super_block
	bdevInode, bdevOpeners field // struct bdev_inode: its inode; its block_device's openers
	bdevDisk, diskPrivate  field // struct bdev_inode: its block_device's disk; struct gendisk
	position               field // struct file
	files, table           field // struct task_struct, struct files_struct
	most, slots            field // struct fdtable
}

func (l *layout) file() fileFields {
	f := fileFields{
		mode: l.member("file", "f_mode"), inode: l.member("file", "f_inode"), mapping: l.member("file", "f_mapping"),
		position: l.member("file", "f_pos"),
		host:     l.member("address_space", "host"),
		kind:     l.member("inode", "i_mode"), number: l.member("inode", "i_rdev"), writers: l.member("inode", "i_writecount"),
		serial: l.member("inode", "i_ino"), super: l.member("inode", "i_sb"),
		magic: l.member("super_block", "s_magic"), device: l.member("super_block", "s_dev"),
		bdevInode: l.member("bdev_inode", "vfs_inode"), bdevOpeners: l.member("block_device", "bd_openers"),
		bdevDisk: l.member("block_device", "bd_disk"), diskPrivate: l.member("gendisk", "private_data"),
		files: l.member("task_struct", "files"), table: l.member("files_struct", "fdt"),
		most: l.member("fdtable", "max_fds"), slots: l.member("fdtable", "fd"),
	}
	bdev := l.member("bdev_inode", "bdev").offset
	f.bdevOpeners.offset += bdev
	f.bdevDisk.offset += bdev
	return f
}

// loopFields are the members of struct loop_device, which may be a module's.
type loopFields struct{ disk, backing field }

func (l *layout) loop() loopFields {
	return loopFields{disk: l.member("loop_device", "lo_disk"), backing: l.member("loop_device", "lo_backing_file")}
}

// taskFields are the members that name a process.
type taskFields struct {
	process, comm, memory, program field // struct task_struct, struct mm_struct
	path, entry, entryName         field // struct file, struct path, struct dentry
	text                           field // struct qstr
	groups, group, node, nodeName  field // struct task_struct, css_set, cgroup, kernfs_node
}

func (l *layout) task() taskFields {
	return taskFields{
		process: l.member("task_struct", "tgid"), comm: l.member("task_struct", "comm"),
		memory: l.member("task_struct", "mm"), program: l.member("mm_struct", "exe_file"),
		path: l.member("file", "f_path"), entry: l.member("path", "dentry"), entryName: l.member("dentry", "d_name"),
		text:   l.member("qstr", "name"),
		groups: l.member("task_struct", "cgroups"), group: l.member("css_set", "dfl_cgrp"),
		node: l.member("cgroup", "kn"), nodeName: l.member("kernfs_node", "name"),
	}
}
