package deferral

import (
	"slices"
	"strconv"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
)

const (
	maxFlags   = 64
	maxFlagLen = 1024
	maxOptions = 4095 // mount(2) takes a page with the NUL at its end
)

// Validate checks an instruction by itself, without the state of the node. No error repeats
// the value of a mount flag: it may be a secret in the wrong field.
func Validate(in *volume.Instruction) error {
	if err := guard.CheckPath("volume_target_path", in.Target); err != nil {
		return err
	}
	switch in.Type {
	case volume.Block:
	case volume.Network:
		return volume.Errorf(volume.Unsupported, "volume %s: network volumes cannot be deferred by any "+
			"configured runtime handler: publish it on the host, or use a block volume", in.Target)
	default:
		return invalid(in, "volume_type is missing or unknown: say BLOCK or NETWORK")
	}
	if err := guard.CheckPath("volume_backing_path", in.Backing); err != nil {
		return err
	}
	if in.FSType == "" {
		return invalid(in, "fs_type is empty: say which filesystem the sandbox shall mount")
	}
	if !volume.IsFSType(in.FSType) {
		return invalid(in, "fs_type %q is not a filesystem's name", sys.Clip(in.FSType))
	}
	if err := checkFlags(in); err != nil {
		return err
	}
	return checkGroup(in)
}

func invalid(in *volume.Instruction, format string, args ...any) error {
	return volume.Errorf(volume.Invalid, "volume %s: "+format, append([]any{in.Target}, args...)...)
}

func checkFlags(in *volume.Instruction) error {
	if len(in.MountFlags) > maxFlags {
		return invalid(in, "%d mount flags are more than the %d that are taken", len(in.MountFlags), maxFlags)
	}
	for i, flag := range in.MountFlags {
		if flag == "" || len(flag) > maxFlagLen || !sys.IsText(flag) {
			return invalid(in, "mount flag %d is empty, longer than %d bytes, or not printable text", i+1, maxFlagLen)
		}
		if name, secret := secretLike(flag); secret {
			return invalid(in, "the mount flag %q looks like a secret, and a deferred instruction "+
				"is kept in clear text: take it out of the mount options, or leave the volume to the host", name)
		}
	}
	options := mountopt.Split(in.MountFlags)
	for _, list := range [][]string{options, append(mountopt.Strip(options), "ro")} {
		if most := len(strings.Join(list, ",")); most > maxOptions {
			return invalid(in, "the mount flags have %d bytes with their commas, more than the %d that mount(2) takes", most, maxOptions)
		}
	}
	if slices.Contains(options, "ro") && slices.Contains(options, "rw") {
		return invalid(in, "the mount flags hold both ro and rw")
	}
	return nil
}

func checkGroup(in *volume.Instruction) error {
	switch in.GroupPolicy {
	case volume.GroupPolicyUnset, volume.GroupAlways, volume.GroupOnMismatch:
	default:
		return invalid(in, "unknown supplemental group change policy %q", sys.Clip(string(in.GroupPolicy)))
	}
	if in.Group == "" {
		if in.GroupPolicy != volume.GroupPolicyUnset {
			return invalid(in, "a supplemental group change policy needs a supplemental group")
		}
		return nil
	}
	gid, err := strconv.ParseUint(in.Group, 10, 32)
	if err != nil || strconv.FormatUint(gid, 10) != in.Group || gid == 1<<32-1 {
		return invalid(in, "volume_supplemental_group %q is not a decimal group id", sys.Clip(in.Group))
	}
	return nil
}

// secretParts are parts of the names of secret mount options of cifs, ceph, glusterfs, fscrypt
// and the FUSE filesystems of object stores.
var secretParts = []string{"pass", "secret", "token", "cred", "apikey", "accesskey", "encryptionkey", "privatekey"}

// secretNames are names of options that carry a secret, or the path of one.
var secretNames = map[string]bool{
	"key": true, "keyfile": true, "keyring": true, "auth": true, "pwd": true, "pw": true, "cruid": true,
	"user": true, "username": true,
}

// withoutMarks is made once, of 6 KiB: an instruction can have 32,000 options.
var withoutMarks = strings.NewReplacer("_", "", "-", "", ".", "")

// secretLike reports whether a mount flag may carry a secret, and returns the option's name: only that may be repeated
// in an error. It errs on the side of caution: a user= option of cifs may hold "user%password".
func secretLike(flag string) (string, bool) {
	for option := range strings.SplitSeq(flag, ",") {
		name, _, hasValue := strings.Cut(option, "=")
		name = strings.TrimSpace(name)
		plain := strings.ToLower(withoutMarks.Replace(name))
		if hasValue && secretNames[plain] {
			return sys.Clip(name), true
		}
		for _, part := range secretParts {
			if strings.Contains(plain, part) && optionForm().MatchString(name) {
				return name, true
			}
			if strings.Contains(plain, part) {
				return part, true
			}
		}
	}
	return "", false
}

// optionForm is a plain word. A "name" such as "password:hunter2", which holds its value, is not repeated.
var optionForm = sys.LazyRegexp(`^[A-Za-z0-9_.-]{0,32}$`)
