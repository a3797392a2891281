package mkfs

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Root is the root directory of a new filesystem. The zero value leaves it to mkfs.
type Root struct {
	// Group is the numeric group of the directory; 0 is root's.
	Group uint32
	// Mode are the permissions, with the setgid bit at the most; 0 leaves them to mkfs.
	Mode uint32
}

// arguments are what the mkfs of one filesystem is given, and a text that it reads from descriptor 5.
type arguments func(uuid string, options []string, root Root) (args []string, prototype string)

// childPrototype is the text as mkfs sees it, behind the device and the lock.
const childPrototype = "/proc/self/fd/5"

// makers of each filesystem. None has a force option: each mkfs then refuses a device that is in use, and xfs and btrfs
// one that holds a filesystem, by their own check. ext4 goes without blocks reserved for root, as is usual for volumes,
// and leaves to the kernel that mounts it what can be initialized later.
var makers = map[string]arguments{"ext4": ext4Args, "xfs": xfsArgs, "btrfs": btrfsArgs}

func (f *Formatter) maker(fsType string) (program, arguments, error) {
	args, ok := makers[fsType]
	if !ok {
		return "", nil, volume.Errorf(volume.Invalid, "%s is not made here: only ext4, xfs and btrfs are; "+
			"make it yourself, or change the volume's filesystem type", fsType)
	}
	mkfs, err := f.tool("mkfs." + fsType)
	return mkfs, args, err
}

// labelNoMode is the label of an ext4 whose root directory still lacks its mode. It is only
// for people: after a restart of the node nothing else tells.
const labelNoMode = "crust-unfinished"

func ext4Args(uuid string, options []string, root Root) ([]string, string) {
	extended := "lazy_itable_init=1,lazy_journal_init=1"
	if root.Group != 0 {
		extended += ",root_owner=0:" + strconv.FormatUint(uint64(root.Group), 10)
	}
	args := []string{"-q", "-m0", "-U", uuid}
	if root.Mode != 0 {
		args = append(args, "-L", labelNoMode)
	}
	for i := 0; i+1 < len(options); i += 2 { // each takes a value
		if options[i] == "-E" { // of several only the last would count
			extended += "," + options[i+1]
			continue
		}
		args = append(args, options[i], options[i+1])
	}
	return append(args, "-E", extended), ""
}

// xfsArgs describe the root directory by a prototype file: the name of a boot block,
// which is not used, two numbers that are not either, and the directory.
func xfsArgs(uuid string, options []string, root Root) (args []string, prototype string) {
	args = append([]string{"-q", "-m", "uuid=" + uuid}, options...)
	if root == (Root{}) {
		return args, ""
	}
	setgid := "-"
	if root.Mode&0o2000 != 0 {
		setgid = "g"
	}
	mode := root.Mode & 0o777
	if root.Mode == 0 {
		mode = 0o755
	}
	return append(args, "-p", childPrototype), fmt.Sprintf("/\n0 0\nd-%s%03o 0 %d\n$\n", setgid, mode, root.Group)
}

// btrfsArgs: mkfs.btrfs cannot set the root directory's group or mode.
func btrfsArgs(uuid string, options []string, _ Root) ([]string, string) {
	return append([]string{"-q", "-U", uuid}, options...), ""
}

// knownOptions are the arguments of each mkfs that a rule may set, with a value. What names another device or file,
// forces, sets the UUID or makes no filesystem is not among them.
var knownOptions = map[string][]string{
	"ext4":  {"-b", "-C", "-E", "-g", "-G", "-i", "-I", "-J", "-m", "-N", "-O", "-T"},
	"xfs":   {"-b", "-d", "-i", "-l", "-m", "-n", "-s"},
	"btrfs": {"-d", "-m", "-n", "-O", "-R", "-s"},
}

// forbiddenParts are parts of values that name a device or file, or take away what we set or rely on.
var forbiddenParts = []string{
	"device", "offset", "root_owner", "root_perms", "test_fs", "journal_dev", // ext4
	"file", "logdev", "internal", "name", "rtdev", "size", "uuid", // xfs; size is checked by itself
}

// CheckOptions says what is wrong with arguments for the mkfs of a filesystem: pairs of an option and its value.
func CheckOptions(fsType string, options []string) error {
	known, ok := knownOptions[fsType]
	if len(options) > 0 && !ok {
		return fmt.Errorf("%s is not made here: only ext4, xfs and btrfs are", fsType)
	}
	if len(options)%2 != 0 {
		return fmt.Errorf("%q are not pairs of an option and its value, such as [\"-i\", \"16384\"]", options)
	}
	for i := 0; i < len(options); i += 2 {
		option, value := options[i], options[i+1]
		if !slices.Contains(known, option) {
			return fmt.Errorf("%q is not one of mkfs.%s's options that may be set here: %s", clip(option), fsType, strings.Join(known, " "))
		}
		if err := checkValue(option, value); err != nil {
			return err
		}
	}
	return nil
}

func checkValue(option, value string) error {
	if value == "" || strings.HasPrefix(value, "-") || strings.ContainsAny(value, "/ \t\n") {
		return fmt.Errorf("%s %q: the value is empty, begins with -, or holds a path or white space", option, clip(value))
	}
	for part := range strings.SplitSeq(value, ",") {
		name, _, _ := strings.Cut(part, "=")
		harmless := name == "size" && option != "-d" // of a block, inode, sector or log; -d's is the whole filesystem's
		if slices.Contains(forbiddenParts, name) && !harmless {
			return fmt.Errorf("%s %q: %s may not be set here", option, clip(value), name)
		}
	}
	return nil
}
