/* Physical memory, reserved addresses, and what maps the one to the other: a part of libcuda.c, which drivers of CUDA 10
 * did not have. */
struct properties { uint32_t kind, types, where; int id; void *win32; unsigned char flags[8]; };
struct access { uint32_t where; int id; uint32_t flags; };

result cuMemGetAllocationGranularity(size_t *granularity, const struct properties *p, uint32_t option) {
    ENTER(SAFE);
    (void)option;
    if (p->kind != 1 || p->types != 1 || p->where != 1) return 1;
    *granularity = 0x200000;
    return 0;
}
result cuMemCreate(uint64_t *handle, size_t len, const struct properties *p, unsigned long long flags) {
    ENTER(0);
    if (flags || len % 0x200000 || p->kind != 1 || p->where != 1) return 1;
    struct object *o = add(PHYSICAL, next_number++, len);
    o->flags = p->types;
    *handle = o->key;
    return 0;
}
result cuMemRelease(uint64_t handle) {
    ENTER(0);
    drop_physical(handle);
    return 0;
}
result cuMemAddressReserve(address *base, size_t len, size_t align, address hint, unsigned long long flags) {
    ENTER(0);
    if (align || hint % 0x200000 || flags) return 1;
    /* A hint is followed where nothing lies, as the real one does. */
    int taken = !hint;
    for (unsigned i = 0; i < sizeof objects / sizeof *objects; i++) {
        struct object *o = &objects[i];
        taken |= o->kind == RESERVED && o->key < hint + len && hint < o->key + o->len;
    }
    *base = taken ? take_addresses(len) : hint;
    add(RESERVED, *base, len);
    return 0;
}
result cuMemAddressFree(address base, size_t len) {
    ENTER(0);
    struct object *o = find(RESERVED, base);
    if (mapped_within(base, len) || (o && o->len != len)) violations++;
    return give_back(RESERVED, base);
}
result cuMemMap(address base, size_t len, size_t offset, uint64_t handle, unsigned long long flags) {
    ENTER(0);
    struct object *r = NULL, *p = find(PHYSICAL, handle);
    for (unsigned i = 0; i < sizeof objects / sizeof *objects; i++)
        if (objects[i].kind == RESERVED && base - objects[i].key < objects[i].len) r = &objects[i];
    if (!r || !p || base + len > r->key + r->len || offset || flags || mapped_within(base, len)) {
        violations++;
        return 1;
    }
    if (len != p->len) return 801;
    p->count++;
    add(MAPPED, base, len)->other = handle;
    return 0;
}
result cuMemUnmap(address base, size_t len) {
    ENTER(0);
    struct object *o = find(MAPPED, base);
    if (o && o->len != len) violations++;
    if (o) drop_physical(o->other);
    return give_back(MAPPED, base);
}
result cuMemSetAccess(address base, size_t len, const struct access *descriptions, size_t count) {
    ENTER(0);
    /* One mapping or several side by side, and nothing else. */
    for (uint64_t at = 0; at < len;) {
        struct object *o = find(MAPPED, base + at);
        if (!o || o->len > len - at || descriptions[0].where != 1) {
            violations++;
            return 1;
        }
        o->flags = descriptions[0].flags;
        at += o->len;
    }
    last_device_count = count;
    return 0;
}
result cuMemExportToShareableHandle(void *out, uint64_t handle, uint32_t type, unsigned long long flags) {
    ENTER(0);
    struct object *p = find(PHYSICAL, handle);
    if (!p || type != 1 || flags) {
        violations++;
        return 1;
    }
    if (!(p->flags & 1)) return 1;
    /* The manual does not say that it is closed on exec. */
    int fd = memfd_create("fake-gpu", 0);
    if (ftruncate(fd, p->len)) abort();
    *(int *)out = fd;
    return 0;
}
result cuMemImportFromShareableHandle(uint64_t *handle, void *fd, uint32_t type) {
    ENTER(0);
    char path[64], name[64] = "";
    struct stat status;
    snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)fd);
    if (readlink(path, name, sizeof name - 1) < 0 || !strstr(name, "fake-gpu") || type != 1) return 999;
    if (fstat((int)(intptr_t)fd, &status)) return 999;
    struct object *o = add(PHYSICAL, next_number++, status.st_size);
    o->flags = 1;
    *handle = o->key;
    return 0;
}
result cuMemRetainAllocationHandle(uint64_t *handle, void *inside) {
    ENTER(0);
    struct object *o = around((address)inside);
    if (!o || o->kind != MAPPED) return 1;
    find(PHYSICAL, o->other)->count++;
    *handle = o->other;
    return 0;
}
result cuMemGetAllocationPropertiesFromHandle(struct properties *p, uint64_t handle) {
    ENTER(0);
    if (!find(PHYSICAL, handle)) return 1;
    *p = (struct properties){ .kind = 1, .types = 1, .where = 1 };
    return 0;
}
