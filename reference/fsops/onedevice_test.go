package fsops

import (
	"bytes"
	"strings"
	"testing"
)

func TestFilesystemsThatNameOtherDevices(t *testing.T) {
	for name, c := range map[string]struct {
		fsType string
		at     int
		bytes  []byte
		want   string
	}{
		"ext4":                                {"ext4", extStart + extJournalDev, nil, ""},
		"ext4 with its journal elsewhere":     {"ext4", extStart + extJournalDev, []byte{0x10, 8}, "journal on another device"},
		"ext4 whose journal is no file of it": {"ext4", extStart + extJournalIno, []byte{0}, "journal on another device"},
		"ext3 with its journal elsewhere":     {"ext3", extStart + extJournalDev, []byte{0x10, 8}, "journal on another device"},
		"btrfs":                               {"btrfs", btrfsStart + btrfsDevicesAt, []byte{1}, ""},
		"btrfs of two devices":                {"btrfs", btrfsStart + btrfsDevicesAt, []byte{2}, "has 2 devices"},
		"xfs, with what would be ext4's word": {"xfs", extStart + extJournalDev, []byte{0x10, 8}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			image := make([]byte, btrfsStart+4096)
			copy(image[extStart+extMagic:], "\x53\xef")
			image[extStart+extGroupBlocks] = 1
			image[extStart+extCompat] = extHasJournal
			image[extStart+extJournalIno] = 8
			copy(image[btrfsStart+btrfsMagicAt:], btrfsMagic)
			copy(image[c.at:], c.bytes)
			err := oneDevice(bytes.NewReader(image), c.fsType)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v", err)
			}
		})
	}
	if oneDevice(bytes.NewReader(nil), "ext4") == nil {
		t.Error("a device that cannot be read is fine")
	}
}
