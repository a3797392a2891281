package deferral

import (
	"strings"
	"testing"
)

func good() Instruction {
	return Instruction{
		Type: Block, Target: "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/pv/mount",
		Backing: "/dev/vdb", FSType: "ext4", MountFlags: []string{"noatime"},
	}
}

func TestValidate(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*Instruction)
		want   string // part of the error; empty means valid
	}{
		"good":                     {func(*Instruction) {}, ""},
		"utf-8 target":             {func(in *Instruction) { in.Target = "/var/lib/kubelet/ü" }, ""},
		"group and policy":         {func(in *Instruction) { in.Group, in.GroupPolicy = "1000", GroupAlways }, ""},
		"no type":                  {func(in *Instruction) { in.Type = "" }, "volume_type"},
		"network":                  {func(in *Instruction) { in.Type = Network }, "network volumes"},
		"no target":                {func(in *Instruction) { in.Target = "" }, "volume_target_path is empty"},
		"no device":                {func(in *Instruction) { in.Backing = "" }, "volume_backing_path is empty"},
		"no filesystem":            {func(in *Instruction) { in.FSType = "" }, "fs_type is empty"},
		"filesystem with a path":   {func(in *Instruction) { in.FSType = "../ext4" }, "fs_type"},
		"filesystem with a comma":  {func(in *Instruction) { in.FSType = "ext4,suid" }, "fs_type"},
		"both ro and rw":           {func(in *Instruction) { in.MountFlags = []string{"ro", "rw"} }, "both ro and rw"},
		"empty flag":               {func(in *Instruction) { in.MountFlags = []string{""} }, "mount flag 1"},
		"flag with newline":        {func(in *Instruction) { in.MountFlags = []string{"a\nb"} }, "mount flag 1"},
		"flag too long":            {func(in *Instruction) { in.MountFlags = []string{strings.Repeat("x", 1025)} }, "mount flag 1"},
		"too many flags":           {func(in *Instruction) { in.MountFlags = make([]string, 65) }, "65 mount flags"},
		"policy without group":     {func(in *Instruction) { in.GroupPolicy = GroupAlways }, "needs a supplemental group"},
		"unknown policy":           {func(in *Instruction) { in.Group, in.GroupPolicy = "1", "Sometimes" }, "unknown supplemental group change policy"},
		"group by name":            {func(in *Instruction) { in.Group = "staff" }, "not a decimal"},
		"negative group":           {func(in *Instruction) { in.Group = "-1" }, "not a decimal"},
		"group with leading zero":  {func(in *Instruction) { in.Group = "010" }, "not a decimal"},
		"the group that means all": {func(in *Instruction) { in.Group = "4294967295" }, "not a decimal"},
		"NUL":                      {func(in *Instruction) { in.Target += "\x00" }, "control characters"},
		"newline":                  {func(in *Instruction) { in.Backing += "\n" }, "control characters"},
		"not UTF-8":                {func(in *Instruction) { in.Target += "\xff" }, "not valid UTF-8"},
		"climbing":                 {func(in *Instruction) { in.Target = "/var/lib/kubelet/../x" }, "climbs"},
		"a path of 4 KiB":          {func(in *Instruction) { in.Target = strings.Repeat("/abc", 1024) }, "4096 bytes long"},
	} {
		t.Run(name, func(t *testing.T) {
			in := good()
			test.change(&in)
			err := in.Validate()
			switch {
			case test.want == "" && err != nil:
				t.Fatalf("refused: %v", err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Fatalf("got %v; want an error with %q", err, test.want)
			}
		})
	}
}

func TestSecretLikeFlagsAreRefusedAndNeverRepeated(t *testing.T) {
	for _, flag := range []string{
		"password=hunter2", "pass=hunter2", "PASSWD=hunter2", "secret=hunter2", "secretfile=/hunter2", "credentials=/hunter2",
		"cred=hunter2", "user=bob%hunter2", "username=hunter2", "key=hunter2", "api_key=hunter2", "access-key=hunter2",
		"token=hunter2", "noatime,password=hunter2", "bearer_token=hunter2", "password:hunter2", "passphrase_hunter2=",
		"encryption.key=hunter2", "keyring=hunter2", "auth=hunter2",
	} {
		in := good()
		in.MountFlags = []string{"noatime", flag}
		err := in.Validate()
		if err == nil {
			t.Errorf("%s was taken", flag)
			continue
		}
		if KindOf(err) != Invalid || (strings.Contains(err.Error(), "hunter2") && flag != "passphrase_hunter2=") {
			t.Errorf("%s: %v", flag, err)
		}
	}
	for _, flag := range []string{"noatime", "data=ordered", "sec=krb5", "errors=remount-ro", "compress=zstd", "journal_checksum", "discard", "usrquota", "uid=1000"} {
		in := good()
		in.MountFlags = []string{flag}
		if err := in.Validate(); err != nil {
			t.Errorf("%s was refused: %v", flag, err)
		}
	}
}

func TestKindOf(t *testing.T) {
	inner := Errorf(InUse, "device is in use")
	outer := Errorf(Busy, "cannot undo: %w", inner)
	if KindOf(outer) != Busy || KindOf(nil) != Internal {
		t.Error("the outermost kind does not win")
	}
	joined := Errorf(Exhausted, "%w; and %w", inner, outer)
	if KindOf(joined) != Exhausted || !strings.Contains(joined.Error(), "device is in use") {
		t.Errorf("joined: %v", joined)
	}
}
