// Package mountopt knows mount options: how a list of flags is split into options,
// what only mount(8) understands, and which options may reach a kernel.
package mountopt

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

const (
	aboutMounts  = "speaks of other mounts or of a loop device, and a sandbox mounts the volume's device by itself"
	otherDevice  = "names another device, and a deferred volume has only the one that was claimed for it"
	driversOwn   = "is a word of the volume's driver, which the driver takes out when it mounts a volume by itself"
	halts        = "halts the machine when this filesystem has an error"
	oddQuotes    = "has quotes or a comma, and only an SELinux label may"
	notOnTheList = "is not on the list of options that a sandbox may mount it with on this node's kernel, or has a value of another form"
)

// refused are options that no sandbox may be given, whether this node's kernel mounts the volume or that of a VM.
var refused = map[string]string{
	"bind": aboutMounts, "rbind": aboutMounts, "move": aboutMounts, "remount": aboutMounts,
	"shared": aboutMounts, "rshared": aboutMounts, "slave": aboutMounts, "rslave": aboutMounts,
	"private": aboutMounts, "rprivate": aboutMounts, "unbindable": aboutMounts, "runbindable": aboutMounts,
	"loop": aboutMounts, "offset": aboutMounts, "sizelimit": aboutMounts, "encryption": aboutMounts,
	"helper": aboutMounts, "uhelper": aboutMounts,

	"journal_path": otherDevice, "journal_dev": otherDevice, // ext4
	"logdev": otherDevice, "rtdev": otherDevice, // xfs
	"device": otherDevice, // btrfs
	"jdev":   otherDevice, // reiserfs, ocfs2 and others

	"fatal_errors": halts, // btrfs: both of its values do

	"read_ahead_kb": driversOwn, // GCP PD
}

// refusedPrefixes are the beginnings of names, as above.
var refusedPrefixes = map[string]string{
	"verity.": otherDevice, // mount(8) sets up dm-verity by these
	"btrfs-":  driversOwn,  // GCP PD
}

// Labels are the options for SELinux labels.
func Labels() []string { return []string{"context", "fscontext", "defcontext", "rootcontext"} }

const labelForm = `"[A-Za-z0-9_.:,-]+"|[A-Za-z0-9_.:-]+`

// Check returns why an option cannot be given to a sandbox, or nil. The error names the option
// and its filesystem, and never the value, which may be a secret.
func Check(fsType, option string) error {
	name, value, _ := strings.Cut(option, "=")
	why := refused[name]
	for prefix, reason := range refusedPrefixes {
		if strings.HasPrefix(name, prefix) {
			why = reason
		}
	}
	switch {
	case option == "errors=panic":
		why = halts
	case slices.Contains(Labels(), name):
		if !matches(labelForm, value) {
			why = oddQuotes
		}
	case strings.ContainsAny(option, `",`):
		why = oddQuotes
	}
	return problem(fsType, name, why)
}

// CheckForHost is Check for a mount that this node's kernel makes: only options on
// the list of the filesystem are taken.
func CheckForHost(fsType, option string) error {
	if err := Check(fsType, option); err != nil {
		return err
	}
	name, _, _ := strings.Cut(option, "=")
	if slices.Contains(Labels(), name) || listed(generic, option) || listed(own[fsType], option) {
		return nil
	}
	return problem(fsType, name, notOnTheList)
}

func problem(fsType, name, why string) error {
	if why == "" {
		return nil
	}
	const most = 64
	if len(name) > most {
		name = name[:most] + "..."
	}
	return fmt.Errorf("the mount option %q of a volume with %s %s: remove it from the mountOptions of the StorageClass "+
		"and of the PersistentVolume, or exclude the volume by a policy rule", name, fsType, why)
}

// generic are options of every filesystem: of the mount itself, and those that the
// kernel takes before a filesystem sees them.
const generic = `defaults ro rw suid nosuid dev nodev exec noexec atime noatime diratime nodiratime relatime norelatime
	strictatime nostrictatime symfollow nosymfollow lazytime nolazytime sync async dirsync nomand`

// For each filesystem the options that concern nothing but the filesystem and its
// own device, as of Linux 6.18: ext4.rst, xfs.rst, btrfs(5). # is a number, and
// #k a number with an optional unit. Left out are options that name something else,
// that halt the machine, that are for debugging or that take the node's memory.
const (
	ext = `acl noacl user_xattr nouser_xattr auto_da_alloc auto_da_alloc=[01] noauto_da_alloc barrier barrier=[01] nobarrier
	block_validity noblock_validity bsddf minixdf bsdgroups grpid nogrpid sysvgroups commit=# data=(journal|ordered|writeback)
	data_err=(abort|ignore) dax dax=(always|inode|never) delalloc nodelalloc dioread_lock dioread_nolock nodioread_nolock
	discard nodiscard errors=(continue|remount-ro) i_version init_itable init_itable=# noinit_itable inlinecrypt
	inode_readahead_blks=[0-9]{1,4} journal_async_commit journal_checksum nojournal_checksum journal_ioprio=[0-7]
	max_batch_time=# min_batch_time=# max_dir_size_kb=# mb_optimize_scan=[01] nombcache noload norecovery
	prefetch_block_bitmaps no_prefetch_block_bitmaps quota noquota usrquota grpquota prjquota resuid=# resgid=# stripe=#`
	xfs = `allocsize=#k attr2 noattr2 bsdgroups grpid nogrpid sysvgroups dax dax=(always|inode|never) discard nodiscard
	filestreams ikeep noikeep inode32 inode64 largeio nolargeio lifetime nolifetime logbsize=#k logbufs=# max_atomic_write=#k
	noalign norecovery nouuid noquota quota uquota usrquota uqnoenforce qnoenforce gquota grpquota gqnoenforce
	pquota prjquota pqnoenforce sunit=# swidth=# swalloc wsync`
	btrfs = `acl noacl autodefrag noautodefrag barrier nobarrier clear_cache commit=# compress compress=WORD compress-force
	compress-force=WORD datacow nodatacow datasum nodatasum discard discard=(sync|async) nodiscard
	flushoncommit noflushoncommit max_inline=#k metadata_ratio=# nologreplay norecovery rescan_uuid_tree rescue=RESCUE
	skip_balance space_cache space_cache=v[12] nospace_cache ssd nossd ssd_spread nossd_spread subvol=PATH subvolid=#
	treelog notreelog usebackuproot user_subvol_rm_allowed`
)

// own are the lists by filesystem.
var own = map[string]string{"ext2": ext, "ext3": ext, "ext4": ext, "xfs": xfs, "btrfs": btrfs}

// forms are what stands for a value above.
var forms = map[string]string{
	"#": `[0-9]{1,19}`, "#k": `[0-9]{1,19}[kKmMgG]?`,
	"WORD": `(no|none|lzo|zlib|zstd)(:[0-9]{1,2})?`, "RESCUE": `[a-z]+(:[a-z]+)*`,
	"PATH": `[^",\\]+`, // in the filesystem, where the kernel resolves it
}

// listed reports whether an option is on a list, with a value of the form that the list requires.
func listed(list, option string) bool {
	name, value, given := strings.Cut(option, "=")
	for entry := range strings.FieldsSeq(list) {
		if entryName, form, wanted := strings.Cut(entry, "="); entryName == name && wanted == given {
			return !given || matches(cmp.Or(forms[form], form), value)
		}
	}
	return false
}

// matches compiles the form at each call: crust-runc, which is started for each step of each
// container, then compiles only those that it needs.
func matches(form, value string) bool {
	matched, err := regexp.MatchString("^("+form+")$", value)
	return err == nil && matched
}

// Split splits mount flags into options, one per element. A flag may hold several options, separated by commas. A comma
// in quotes does not separate: SELinux labels hold commas. Split a list before you search it for an option.
func Split(flags []string) []string {
	options := make([]string, 0, len(flags)+1)
	for _, flag := range flags {
		options = splitFlag(options, flag)
	}
	return options
}

func splitFlag(options []string, flag string) []string {
	quoted, begin := false, 0
	for i := 0; i <= len(flag); i++ {
		switch {
		case i == len(flag), flag[i] == ',' && !quoted:
			if option := strings.TrimSpace(flag[begin:i]); option != "" {
				options = append(options, option)
			}
			begin = i + 1
		case flag[i] == '"':
			quoted = !quoted
		}
	}
	return options
}

// forMount8 are options that only mount(8) understands, with the kernel's options
// that they imply. A kernel that is given them refuses the mount.
var forMount8 = map[string][]string{
	"_netdev": nil, "nofail": nil, "auto": nil, "noauto": nil, "comment": nil,
	"silent": nil, "loud": nil,
	"nouser": nil, "nousers": nil, "noowner": nil, "nogroup": nil,
	"user": {"noexec", "nosuid", "nodev"}, "users": {"noexec", "nosuid", "nodev"},
	"owner": {"nosuid", "nodev"}, "group": {"nosuid", "nodev"},
}

// Strip removes what only mount(8) understands. Options of the kernel that such an option
// implies take its place, so that a later option still overrides them.
func Strip(options []string) []string {
	kept := make([]string, 0, len(options)+1)
	for _, option := range options {
		if strings.HasPrefix(option, "x-") || strings.HasPrefix(option, "X-") {
			continue
		}
		name, _, _ := strings.Cut(option, "=")
		implied, known := forMount8[name]
		if !known {
			implied = []string{option}
		}
		kept = append(kept, implied...)
	}
	return kept
}

// Options lists the volume's mount options for a kernel, one per element. "ro" is among them
// exactly if the volume is read-only: runtimes search for an element that is exactly "ro".
func Options(v *volume.Volume) []string {
	options := slices.DeleteFunc(Strip(Split(v.MountFlags)), func(option string) bool {
		return option == "ro" || option == "rw" && v.ReadOnly
	})
	if v.ReadOnly {
		options = append(options, "ro")
	}
	return options
}

// NoReplay returns the option with which a kernel mounts a filesystem read-only without a replay of its journal or log.
func NoReplay(fsType string) string {
	switch fsType {
	case "xfs":
		return "norecovery"
	case "btrfs":
		return "rescue=nologreplay"
	default:
		return "noload"
	}
}

// SkipsReplay reports whether one of the options keeps the kernel from replaying the journal or
// log of ext4, xfs or btrfs.
func SkipsReplay(options []string) bool {
	return slices.ContainsFunc(options, func(option string) bool {
		return slices.Contains([]string{"noload", "norecovery", "nologreplay", "rescue=nologreplay", "rescue=all"}, option)
	})
}
